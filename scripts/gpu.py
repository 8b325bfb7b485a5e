"""The contract suites and the benchmarks on a GPU; ``gpu.sh`` calls this with ``src`` on the path.

Everything runs in processes of its own, which a device that hangs or fails cannot take with it. The file of
results is that of ``benchmarks.run``; all that was said lies beside it.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = 0.5  # the share of the time that the tests may take; what they leave is the benchmarks'
LAST_S = 40.0  # the case at work when the time is over, and the run against itself, take about so long
REPORT_S = 10.0  # and the report
LATE = 124  # the status of a process that was ended because its time was over


def main(argv: Sequence[str] | None = None) -> int:
    """Run both; 1 when a test failed, a result was wrong or something was broken off, 2 without a device."""
    parser = argparse.ArgumentParser(prog="scripts/gpu.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=8.0, metavar="N", help="for all of it (default 8)")
    parser.add_argument("--reduced", action="store_true", help="few tests and tiny sizes on the CPU: all of it runs")
    options = parser.parse_args(argv)
    start = time.monotonic()
    end = start + 60 * options.minutes
    missing = [package for package in ("torch", "pytest", "jaxtyping") if not there(package)]
    if missing:
        say(f"{sys.executable} has no {', '.join(missing)}; name a Python that does: PYTHON=… bash scripts/gpu.sh")
        return 2
    import torch

    if not options.reduced and not torch.cuda.is_available():
        say(f"torch {torch.__version__} finds no CUDA device; --reduced shows on the CPU that everything runs.")
        return 2
    device = "cpu" if options.reduced else "cuda"
    say(machine(device))
    results = new_file(options.out.resolve(), name(device))
    log = results.with_suffix(".log")
    say(f"Results: {results}; all that is said: {log}")
    wrong = tests(device, options.reduced, log, TESTS * (end - time.monotonic()))
    wrong += benchmarks(device, options.reduced, results, log, end - time.monotonic())
    say("\n".join([*wrong, f"{len(wrong) or 'Nothing'} wrong, in {time.monotonic() - start:.0f} s."]))
    return 1 if wrong else 0


def machine(device: str) -> str:
    """Where and with what this runs, and what is missing."""
    import torch

    lines = [f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"]
    if device == "cuda":
        it = torch.cuda.get_device_properties(0)
        lines += [
            f"{it.name}, compute capability {it.major}.{it.minor}, {it.total_memory / 2**30:.0f} GiB",
            f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        ]
    else:
        lines.append("Reduced, on the CPU: this shows that everything runs, without checking annotations as it does.")
    for package, without in (
        ("triton", "nothing is compiled, and FlexAttention takes no part"),
        ("beartype", "the annotations are not checked as the tests run"),
    ):
        if not there(package):
            lines.append(f"No {package}: {without}.")
    return "\n".join(lines)


def tests(device: str, reduced: bool, log: Path, seconds: float) -> list[str]:
    """Run the contract suites; what is wrong, as lines."""
    end, wrong = time.monotonic() + seconds, []
    chosen = "gpu and not slow" if reduced else "gpu"
    hook = "--jaxtyping-packages=headwise,beartype.beartype"
    hooked = there("beartype") and not reduced
    calls = [[f"{chosen} and not plain", hook], [f"{chosen} and plain"]] if hooked else [[chosen]]
    for marks, *options in calls:
        # a test that hangs says where, and a device that is lost does not fail a thousand tests
        options += ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=100", "--maxfail=50"]
        command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-m", marks, *options]
        status = call(command, {"HEADWISE_DEVICE": device}, max(1.0, end - time.monotonic()), log)
        if status == LATE:
            wrong.append(f"WRONG: the tests were not done in time ({marks}).")
        elif status != 0:
            wrong.append(f"WRONG: pytest ended with status {status} ({marks}).")
    return wrong


def benchmarks(device: str, reduced: bool, results: Path, log: Path, seconds: float) -> list[str]:
    """Run the benchmarks, print their report; what is wrong, as lines."""
    stop = max(0.0, seconds - LAST_S)
    command = [sys.executable, "-m", "benchmarks.run", "--suite", "gpu", "--device", device]
    command += ["--seconds", f"{stop:.0f}", "--output", str(results), *["--quick"] * reduced]
    status = call(command, {}, max(1.0, seconds - REPORT_S), log)
    if not results.exists():
        return [f"WRONG: the benchmarks did not start (status {status})."]
    call([sys.executable, "-m", "benchmarks.report", str(results)], {}, 60.0, log)
    # a run that was ended may have left half a line
    records = [json.loads(line) for line in results.read_text().splitlines() if line.endswith("}")]
    wrong = [f"WRONG: {r['case']}  {r['competitor']}: {r['not_timed']}" for r in records if is_wrong(r)]
    kinds = {r["kind"] for r in records}
    if "self" not in kinds:
        wrong.append(f"WRONG: the benchmarks were broken off (status {status}).")
    elif "measurement" not in kinds:
        wrong.append("WRONG: there was no time for any benchmark.")
    return wrong


def is_wrong(record: dict) -> bool:
    """Whether a cell disagrees with the reference, or headwise failed in it for another reason than memory."""
    said = record.get("not_timed") or ""
    ours = record.get("competitor", "").startswith("headwise")
    return said.startswith("not equal") or (ours and said.startswith("failed") and "OutOfMemory" not in said)


def call(command: Sequence[str], environ: dict[str, str], seconds: float, log: Path) -> int:
    """Run a command in the checkout, show what it says and add it to the log; LATE if it had to be ended."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **environ}
    say("$ " + " ".join(command))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # its children end with it
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        with log.open("a", encoding="utf-8") as kept:
            for line in process.stdout:
                print(line, end="", flush=True)
                kept.write(line)
        status = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        say(f"Ended after {seconds:.0f} s, as its time was over.")
        return LATE
    return status


def name(device: str) -> str:
    """What the results are called: date and device."""
    import torch

    it = torch.cuda.get_device_name(0) if device == "cuda" else "cpu-reduced"
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}_{re.sub(r'[^a-z0-9]+', '-', it.lower()).strip('-')}_gpu"


def new_file(folder: Path, stem: str) -> Path:
    """A file of results that does not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (path := folder / f"{stem}{'' if number == 1 else f'-{number}'}.jsonl").exists():
        number += 1
    return path


def there(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def say(text: str) -> None:
    """Print before what a child process writes."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
