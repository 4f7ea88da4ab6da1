"""Every command and every piece of Python shown in README, docs and cards runs."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fwzoo.training.sample_text import pydoc_topics
from hub_server import serve

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "model_cards").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNABLE = {"python", "bash"}


def fences(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if any(k in RUNNABLE for k, _ in fences(p))], ids=lambda p: p.stem)
def test_what_is_shown_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = pydoc_topics()
    (tmp_path / "book.txt").write_text("\n\n".join(text.train[:40]), encoding="utf-8")
    if any("fwzoo push" in code for _, code in fences(page)):
        with serve() as hub:
            for name, value in hub.environment(tmp_path / "home").items():
                monkeypatch.setenv(name, value)
            run_fences(page, tmp_path, in_process=False)
    else:
        run_fences(page, tmp_path, in_process=True)


def run_fences(page: Path, folder: Path, in_process: bool) -> None:
    """Run what a page shows; Python in a process of its own where the environment has to be read anew."""
    jobs: list[subprocess.Popen[bytes]] = []
    names = {"__name__": "__main__"}  # a page is read from top to bottom
    try:
        for kind, code in fences(page):
            if kind == "python" and in_process:
                exec(compile(code, f"{page.name}", "exec"), names)
            elif kind == "python":
                command = [sys.executable, "-c", code]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, f"{code}\n{done.stderr}"
            elif kind == "bash":
                for line in code.splitlines():
                    run(line, folder, jobs)
    finally:
        for job in jobs:
            job.kill()


def run(line: str, folder: Path, jobs: list[subprocess.Popen[bytes]]) -> None:
    """Run one command. `make` only says what it would do: this test is part of `make test` itself."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[:2] == ["kill", "%1"]:
        jobs[0].terminate()
        assert jobs.pop(0).wait(timeout=60) in (0, -signal.SIGTERM), line
        return
    if words[-1] == "&":  # a server: it is ready when its port answers
        jobs.append(subprocess.Popen([sys.executable, "-m", "fwzoo", *words[1:-1]], cwd=folder))
        port = int(words[words.index("--port") + 1])
        for _ in range(600):
            if not socket.socket().connect_ex(("localhost", port)):
                return
            assert jobs[-1].poll() is None, line
            time.sleep(0.1)
    if words[0] == "make":
        words, folder = ["make", "--dry-run", *words[1:]], ROOT
    elif words[0] == "fwzoo":
        words = [sys.executable, "-m", "fwzoo", *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
        folder = ROOT
    else:
        raise AssertionError(f"the test does not know how to run {line!r}")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_every_fence_says_what_it_is() -> None:
    for page in PAGES:
        for kind, code in fences(page):
            assert kind in {*RUNNABLE, "text"}, f"{page.name}: {code[:60]}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_architecture_has_a_card() -> None:
    import fwzoo

    for name in fwzoo.registry.architectures():
        assert (ROOT / "model_cards" / f"{name}.md").exists()
