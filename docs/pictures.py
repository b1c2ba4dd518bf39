"""Draw the pictures of the pages: ``make pictures``, which needs Debian's chromium and the package playwright."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from playwright.sync_api import Page, sync_playwright
from torch import nn

from parawrap import Platform, current_rank, parallel, wrapper

IMAGES = Path(__file__).parent / "images"
WIDTH = 1000


def normalized(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch of images as the model takes it."""
    return torch.nn.functional.interpolate(batch, 32).sub(batch.mean()).div(batch.std())


def block(path: Path) -> None:
    """Stream batches through two lanes, and write the timeline."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(4))
    batches = [torch.randn(16 + 4 * (number % 3), 3, 48, 48) for number in range(13)]
    with torch.no_grad(), parallel(model, ["cpu", "cpu"], out_dims=0) as p:
        list(p.map(batches, prepare=normalized))
        with p.trace(path):
            list(p.map(batches, prepare=normalized))


def train() -> None:
    """Compute for a while, and meet the other rank."""
    time.sleep(0.1 * (1 + current_rank().global_rank))
    dist.barrier()


def launch(path: Path) -> None:
    """Launch a function in two ranks, and write the timeline."""
    launched = wrapper(Platform(device="cpu", n_cpus=2, trace=path, verbose=False))(train)
    launched()
    launched()  # from the warm process


def draw(page: Page, path: Path, name: str) -> None:
    """Write a picture of a page, without the space below it."""
    page.goto(path.as_uri())
    page.add_style_tag(content="#details, #help, .table { display: none }")
    page.screenshot(path=IMAGES / name, full_page=True)


def main() -> None:
    """Write docs/images/timeline.png and docs/images/launch.png."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 200})
        for make in (block, launch):
            path = Path(folder, f"{make.__name__}.html")
            make(path)
            draw(page, path, {"block": "timeline.png", "launch": "launch.png"}[make.__name__])
        browser.close()


if __name__ == "__main__":
    main()
