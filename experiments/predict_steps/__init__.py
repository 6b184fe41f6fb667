"""What will the bench measure? Step time, exposed communication, volume and peak memory, written down beforehand.

    python -m experiments.predict_steps --calibrate records/ddp_bench/h200x2_xl_batch8.json \
        --memory records/ddp_bench/h200x2_medium_batch8.json \
        --cases xl:2 xl:8 medium:8 --ranks 2 4 --out records/predictions/h200.json

and afterwards, beside what was measured:

    python -m experiments.predict_steps --compare records/ddp_bench/h200x[24]_*.json \
        --predictions records/predictions/h200.json --out records/predictions/h200_compared.json

Five constants of the machine come from one record of ddp_bench (its local, naive, flat and overlap rows), and the
memory bandwidth of operators from `local` of another (see `distlab.simulate.calibrate`); all other numbers are
predictions from the simulated steps.

Predicting is in `prediction`, holding predictions against records in `comparison`.
"""

from .comparison import COMPARISON, COMPARISON_VIEW, compare
from .prediction import VIEW, PredictConfig, run

__all__ = ["COMPARISON", "COMPARISON_VIEW", "VIEW", "PredictConfig", "compare", "run"]
