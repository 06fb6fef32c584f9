#!/usr/bin/env python3
"""Run the commands of README.md that are marked for it, as a reader would, from the root of the repository.

A block is marked by a comment on the line above its fence:

    <!-- checked -->
    ```bash
    make demo
    ```

Fails when a command fails, or when no block is marked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- checked -->\n+```bash\n(?P<commands>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def marked_blocks(text: str) -> list[str]:
    """The commands of every marked block, in order."""
    return [match.group("commands") for match in BLOCK.finditer(text)]


def main() -> int:
    readme = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "README.md"
    blocks = marked_blocks(readme.read_text(encoding="utf-8"))
    if not blocks:
        print(f"check_readme: {readme.name} has no block marked <!-- checked -->", file=sys.stderr)
        return 1
    for number, commands in enumerate(blocks, 1):
        print(f"check_readme: block {number} of {len(blocks)}\n{commands.rstrip()}", flush=True)
        started = time.monotonic()
        shell = ["bash", "-euo", "pipefail", "-c", commands]
        code = subprocess.run(shell, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode
        print(f"check_readme: exit {code} after {time.monotonic() - started:.0f} s", flush=True)
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
