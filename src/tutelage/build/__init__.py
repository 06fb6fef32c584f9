"""The only place that wires objects together: a validated recipe becomes a run, a check, or a chat."""

from __future__ import annotations

from tutelage.build.chat import chat_engine
from tutelage.build.check import check_recipe
from tutelage.build.run import RunResult, resume_run, run_recipe

__all__ = ["RunResult", "chat_engine", "check_recipe", "resume_run", "run_recipe"]
