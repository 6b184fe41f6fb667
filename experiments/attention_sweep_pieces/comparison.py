"""Ours beside the fastest other variant of each shape."""

import itertools

from distlab.report import Column, Record, View
from distlab.report.noise import TIE, tied

COMPARISON = "attention_comparison"


def beside_best_peer(records: list[Record]) -> list[Record]:
    """One record per type, head dim and length: forward+backward of ours and of the fastest other variant.

    `code` is the commit at which that shape was measured: a file may hold shapes of several runs.
    """
    found = []
    shape_of = lambda r: (r.config["dtype"], r.config["head_dim"], r.config["length"])  # noqa: E731
    for shape, group in itertools.groupby(sorted(records, key=shape_of), shape_of):
        rows = {r.variant: r for r in group if r.metrics.get("fwd_bwd_device_p50_ms") is not None}
        ours = rows.pop("ours", None)
        peers = [r for r in rows.values() if not r.variant.startswith("ours")]
        if ours is None or not peers:
            continue
        best = min(peers, key=lambda r: r.metrics["fwd_bwd_device_p50_ms"])
        ms, peer_ms = (r.metrics["fwd_bwd_device_p50_ms"] for r in (ours, best))
        config = dict(zip(("dtype", "head_dim", "length"), shape, strict=True))
        config["code"] = (ours.commit or "unknown")[:7]
        metrics = {"ours_ms": ms, "peer": best.variant, "peer_ms": peer_ms, "ours_over_peer": ms / peer_ms}
        if tied(ours.metrics, best.metrics, "fwd_bwd_device"):
            metrics["is_tie"] = True
        found.append(Record(COMPARISON, "ours", config, metrics, ours.environment, ours.commit))
    return found


def crossovers(records: list[Record]) -> list[str]:
    """Per type and head dim, the lengths at which a peer is faster."""
    lines = []
    for dtype, head_dim in sorted({(r.config["dtype"], r.config["head_dim"]) for r in records}):
        mine = [r for r in beside_best_peer(records) if (r.config["dtype"], r.config["head_dim"]) == (dtype, head_dim)]
        slower = [r for r in mine if r.metrics["ours_over_peer"] > 1 and not r.metrics.get("is_tie")]
        behind = [f"{r.config['length']} ({r.metrics['peer']} {r.metrics['peer_ms']:.4f} ms, ours "
                  f"{r.metrics['ours_ms']:.4f})" for r in slower]
        ties = [str(r.config["length"]) for r in mine if r.metrics.get("is_tie")]
        verdict = "a peer is faster at " + ", ".join(behind) if behind else "ours is the fastest at every length"
        if ties:
            verdict = f"{verdict if behind else 'no peer is faster'}; a tie at {', '.join(ties)}"
        lines.append(f"{dtype} d={head_dim}: {verdict if mine else 'no device times to compare'}")
    return lines


def headline(records: list[Record]) -> str:
    """One line that says what the comparison below it was measured on."""
    env = records[0].environment
    return (f"Batch 1, one head, causal, forward + backward, device time, {env['device_name']}, torch {env['torch']}, "
            f"triton {env['triton']}")


COMPARISON_COLUMNS = [
    Column("config.dtype", "type"), Column("config.head_dim", "d"), Column("config.length", "length"),
    Column("metrics.ours_ms", "ours ms", ".4f"), Column("metrics.peer", "fastest peer"),
    Column("metrics.peer_ms", "its ms", ".4f"),
    Column("metrics.ours_over_peer", "ours / peer", ".2f", note=lambda r: TIE if r.metrics.get("is_tie") else ""),
    Column("config.code", "code"),
]
COMPARISON_VIEW = View(
    name=COMPARISON,
    question="Ours beside the fastest other variant of each shape",
    columns=COMPARISON_COLUMNS,
    headline=lambda records: headline(records) + "; each shape by the code in the last column",
    reading="Above 1 the peer is faster.",
)
