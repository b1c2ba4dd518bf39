"""Draw the pictures of the pages: ``make pictures``.

It needs Debian's chromium and the package playwright. The diagrams are those of drawings.py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import drawings
import torch
from playwright.sync_api import Page, sync_playwright
from torch import nn

from parawrap import Platform, current_rank, parallel, wrapper

IMAGES = Path(__file__).parent / "images"
WIDTH = 1000
RANKS = Platform(device="cpu", n_cpus=2, verbose=False)


def normalized(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch of images as the model takes it."""
    return torch.nn.functional.interpolate(batch, 32).sub(batch.mean()).div(batch.std())


def block(path: Path) -> None:
    """Stream batches through two lanes, and write the timeline."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(2), nn.AdaptiveAvgPool1d(4)
    )
    batches = [torch.randn(16 + 4 * (number % 3), 3, 48, 48) for number in range(13)]
    with torch.no_grad(), parallel(model, ["cpu", "cpu"], out_dims=0) as p:
        list(p.map(batches, prepare=normalized))
        with p.trace(path):
            list(p.map(batches, prepare=normalized))


def notebook(path: Path) -> None:
    """Write a page with the tables that a notebook shows."""
    launch = wrapper(RANKS)(square).submit()
    launched = launch.results()
    with torch.no_grad(), parallel(nn.Linear(16, 4), ["cpu", "cpu"], out_dims=0) as p:
        list(p.map(torch.randn(640, 16).split(64)))
    tables = [value._repr_html_() for value in (launch, launched, p.stats())]
    style = "font:14px sans-serif;padding:16px;margin:0;width:max-content"
    path.write_text(f"<body style='{style}'>{'<br>'.join(tables)}</body>")


def square() -> int:
    """Return the square of the rank's number."""
    print("computing a square")
    return current_rank().global_rank ** 2


def draw(page: Page, path: Path, name: str) -> None:
    """Write a picture of a page, without the space around its content."""
    page.goto(path.as_uri())
    page.add_style_tag(content="#details, #help, .table { display: none }")
    page.locator("body").screenshot(path=IMAGES / name)


PICTURES = {block: "timeline.png", notebook: "notebook.png"}


def main() -> None:
    """Write the diagrams and the pictures to docs/images."""
    drawings.main()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 200})
        for make, name in PICTURES.items():
            path = Path(folder, f"{make.__name__}.html")
            make(path)
            draw(page, path, name)
        browser.close()


if __name__ == "__main__":
    main()
