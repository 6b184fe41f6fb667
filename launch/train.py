"""The trainer: run `distlab train` as a file.

    torchrun --nproc-per-node N launch/train.py
    python launch/train.py                       starts the ranks here

See trainer.py in this folder.
"""

import sys
from pathlib import Path

# torchrun puts this file's folder first. `launch` is found in the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.__main__ import console

if __name__ == "__main__":
    sys.argv[1:1] = ["train"]
    console()
