"""Draws what a command prints in a colour terminal, as an SVG that fetches no font.

python docs/images/terminal.py formats.svg "plimsoll formats e4m3" plimsoll formats e4m3
python docs/images/terminal.py tour.svg "python examples/00_tour.py" python examples/00_tour.py
python docs/images/terminal.py demo.svg "make demo" plimsoll lab demo -o demo
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 80

target, title, *command = sys.argv[1:]
environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
with Path(os.devnull).open("w") as nowhere:
    console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
    console.print(Text.from_ansi(printed))
    picture = console.export_svg(title=title)
picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
Path(__file__).with_name(target).write_text(picture)
