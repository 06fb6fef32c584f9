"""Where tests of the compiled kernels may be skipped: without a compiler.  With one, a failure is a failure."""

from __future__ import annotations

import pytest

from tutelage.native import build


def why_no_compiler() -> str:
    try:
        build.compiler_command()
    except OSError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(why_no_compiler()), reason=why_no_compiler())
