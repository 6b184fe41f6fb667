"""What `experiments/sabotage.py` is made of.

`injected` holds the broken twins of healthy code, `mistakes` the list of them with what each is trained on, and
`checks` what has to notice.
"""
