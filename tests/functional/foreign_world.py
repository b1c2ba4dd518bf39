"""Script for torchrun: use `functional` in a world of two ranks that parawrap did not start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from parawrap import functional


def main(folder: Path) -> None:
    """Call every helper that exchanges values, and write this rank's results to a file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = functional.shard_loader(
        DataLoader(torch.arange(5.0), 2, shuffle=True, generator=torch.Generator().manual_seed(rank))
    )
    rows = torch.cat(list(loader))
    evaluated = functional.shard_loader(DataLoader(torch.arange(1.0)), pad=False)
    mine = list(evaluated)
    found = {
        "rows": rows.tolist(),
        "gathered": functional.gather_rows(rows, loader).tolist(),
        "one row": functional.gather_rows(torch.cat(mine) if mine else torch.empty(0), evaluated).tolist(),
        "mean": functional.reduce_metrics(float(rank), weight=len(mine)),
        "model": type(functional.to(torch.nn.Linear(1, 1), device="cpu", strategy="fsdp2")).__name__,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
