"""The trainer: `torchrun --nproc-per-node N launch/train.py`, or `python launch/train.py` to start ranks here.

The same as `distlab train`; see trainer.py beside this file.
"""

import sys
from pathlib import Path

# torchrun puts this file's folder there
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.__main__ import console

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    console()
