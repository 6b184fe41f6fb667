"""Interleaved rounds: everybody once per round, in an order that favours nobody."""

from distlab.measure.rounds import interleave, rotated


def test_every_variant_is_called_once_per_round_in_its_order():
    said, called = [], []
    calls = {name: lambda name=name: called.append(name) or len(called) for name in "abc"}
    found = interleave(calls, 3, progress=said.append)
    assert "".join(called) == "abccbaabc"
    assert found == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}
    assert said[3] == "round 2/3: c" and len(said) == 9
    called.clear()
    interleave(calls, 4, order=rotated)
    assert "".join(called) == "abcbcacababc"
