"""Draw all pictures: `python -m docs.pictures` (`make pictures`)."""

from pathlib import Path

from docs.pictures.all_pictures import PICTURES

for name, draw in PICTURES.items():
    draw().save(Path(__file__).parent / f"{name}.svg")
