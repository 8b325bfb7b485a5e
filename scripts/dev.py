#!/usr/bin/env python3
"""Set-up and daily commands: one file that needs nothing but Python.

Every command first makes sure that ``.venv`` in this checkout holds what it needs, at the versions of
``constraints.txt``; when it does, which is known from a stamp file, that costs a few milliseconds.
``make look``, ``make test`` and so on call this file, so both forms do the same.

The syntax is that of Python 3.7 on purpose: an older Python has to get as far as finding a newer one.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "headwise-setup.json"
PIP_LOG = VENV / "pip.log"

OLDEST, NEWEST = (3, 11), (3, 14)
LEAST_TORCH = (2, 11)

LOOK = ["cli", "plot", "transformers"]
TEST = [*LOOK, "onnx", "bench", "test"]
ALL = [*TEST, "docs", "check"]
# command: what it does, and the extras of pyproject.toml that it needs
COMMANDS = {
    "setup": ("install everything into .venv", ALL),
    "look": ("show what the heads of a trained model do with TEXT (an environment variable)", LOOK),
    "test": ("run the tests; pytest's own arguments follow after --", TEST),
    "test-all": ("run every test, the slow ones and those for a GPU too", TEST),
    "check": ("formatting, lint, types, and the documentation with warnings as errors", ALL),
    "docs": ("build the documentation into build/docs", ALL),
    "clean": ("remove .venv, build and caches", []),
}

# MB to download and on disk, measured on Linux x86-64 with Python 3.11; each counts what those above it lack.
SIZES = {
    "torch": (205, 870),
    "cli": (5, 25),
    "plot": (42, 170),
    "transformers": (25, 160),
    "onnx": (10, 36),
    "bench": (45, 205),
    "test": (5, 20),
    "docs": (20, 70),
    "check": (28, 90),
}
# torch 2.13.0 as the default index has it for Linux, with the libraries of CUDA 13
CUDA_DOWNLOAD = 2750


class Problem(Exception):
    """Something the user has to put right; the message says what and how."""


def say(text):
    print(text, flush=True)  # before what a child process writes


# --- finding a Python

# Runs in any Python, however old.
PROBE = """
import json, sys
found = {"path": sys.executable, "version": list(sys.version_info[:3])}
found.update(venv=True, pip=True, torch=None)
try:
    import ensurepip, venv
except ImportError:
    found["venv"] = False
try:
    import importlib.util
    found["pip"] = importlib.util.find_spec("pip") is not None
    from importlib import metadata
    torch = metadata.distribution("torch")
    found["torch"], found["torch_folder"] = torch.version, str(torch.locate_file(""))
except Exception:
    pass
print(json.dumps(found))
"""


def probe(python, environ=None):
    """Describe the Python of that command; None where it does not run, like a shim without its Python."""
    try:
        done = subprocess.run(
            [str(python), "-c", PROBE],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=str(ROOT),  # a json.py where the user stands is not ours
            env=environ,
            timeout=60,
        )
        return json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def numbers(version):
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def why_not(found, reuse_torch):
    """The reason why a probed Python cannot be used, or None."""
    major, minor = found["version"][:2]
    if not OLDEST <= (major, minor) <= NEWEST:
        return "headwise needs Python 3.11 to 3.14"
    if not found["venv"]:
        return f"its venv module is missing; on Debian or Ubuntu: apt install python{major}.{minor}-venv"
    if reuse_torch and not found["torch"]:
        return "it has no torch to reuse"
    if reuse_torch and numbers(found["torch"]) < LEAST_TORCH:
        return "its torch {} is older than {}.{}".format(found["torch"], *LEAST_TORCH)
    return None


def find_python(reuse_torch, environ):
    """The first usable Python: the running one, then the named ones on PATH from new to old."""
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    commands = [sys.executable] + [shutil.which(name) for name in [*names, "python3", "python"]]
    reasons = {}  # by interpreter, as several names may lead to one
    for command in dict.fromkeys(filter(None, commands)):
        found = probe(command, environ)
        if found is None:
            continue
        reason = why_not(found, reuse_torch)
        if reason is None:
            return found
        version = ".".join(map(str, found["version"]))
        reasons.setdefault(os.path.realpath(found["path"]), f"  {command} (Python {version}): {reason}.")
    last = "Put one that can on PATH and run this again."
    raise Problem("\n".join(["No Python here can be used.", *reasons.values(), last]))


# --- the environment of child processes


def usable_home(environ):
    """A home folder that can be written to: pip, matplotlib and transformers keep caches there."""
    home = environ.get("HOME")
    if not home:
        with contextlib.suppress(KeyError):  # a user id without a name, as in containers
            import pwd

            home = pwd.getpwuid(os.getuid()).pw_dir
    if not home or not os.path.isdir(home) or not os.access(home, os.W_OK):
        home = str(ROOT / "build" / "home")
        os.makedirs(home, exist_ok=True)
    return home


def child_environment(environ):
    """The environment as it is, without what make and other Pythons left in it; pip's variables stay."""
    strangers = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONHOME", "TEXT"}
    child = {name: value for name, value in environ.items() if name not in strangers}
    if os.name != "nt":
        child["HOME"] = usable_home(environ)
    return child


def look_environment(environ):
    """The text to look at goes through the environment, where no shell reads it."""
    child = child_environment(environ)
    if environ.get("TEXT"):
        child["HEADWISE_TEXT"] = environ["TEXT"]
    child.setdefault("PYTHONUTF8", "1")  # the tables have characters that an old locale cannot print
    return child


# --- the set-up


def read_stamp():
    """What is known of .venv: created (by this script), finished, extras, fingerprint, reuse_torch."""
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def write_stamp(stamp):
    new = STAMP.with_suffix(".new")
    new.write_text(json.dumps(stamp))
    os.replace(str(new), str(STAMP))


def fingerprint(root):
    """Of all that decides what is installed; an editable install also knows the folder it was made in."""
    python = ""
    with contextlib.suppress(OSError):
        python = re.sub(r"(?m)^(?!version).*\n?", "", (root / ".venv" / "pyvenv.cfg").read_text())
    sources = ("pyproject.toml", "constraints.txt", "CMakeLists.txt", *sorted((root / "csrc").glob("*")))
    parts = [(root / name).read_bytes() for name in sources if (root / name).is_file()]
    return hashlib.sha256(b"\0".join([*parts, str(root).encode(), python.encode()])).hexdigest()


def ready(stamp, extras, now):
    """Whether an environment with this stamp has the extras as the files want them now."""
    if not stamp.get("finished") or stamp.get("fingerprint") != now:
        return False
    return set(extras) <= set(stamp.get("extras", []))


def pins_for(constraints, torch):
    """The constraints with the pin of torch moved to the version that is kept."""
    return re.sub(r"(?m)^torch==.*$", f"torch=={torch}", constraints)


def has_cpu_torch(pip_config, minor):
    """Whether `pip config list` names builds of torch without CUDA: wheels on disk, or a CPU index."""
    for key, value in re.findall(r"(?m)^(\S+)=(['\"].*['\"])$", pip_config):
        if key.rpartition(".")[2] in {"find-links", "index-url", "extra-index-url"}:
            for place in value.strip("'\"").replace("\\n", " ").split():
                # on disk only a wheel for this Python counts: pip passes over the others
                folder = Path(place[len("file://") :] if place.startswith("file://") else place)
                wheels = list(folder.glob(f"torch-*cpu-cp3{minor}-*.whl")) if folder.is_dir() else []
                if wheels or re.search(r"^https?://.*\bcpu\b", place):
                    return True
    return False


def size_note(missing, cuda):
    """Roughly what is going to be downloaded, and what it takes on disk."""
    download, disk = (sum(SIZES[part][column] for part in missing) for column in (0, 1))
    if "torch" in missing and cuda:
        gigabytes = (download - SIZES["torch"][0] + CUDA_DOWNLOAD) / 1000
        return (
            f"To download: about {gigabytes:.1f} GB, more on disk, for pip's torch on Linux brings CUDA.\n"
            "Without an NVIDIA GPU, stop here and point pip at CPU builds of torch (PIP_EXTRA_INDEX_URL,\n"
            "or PIP_FIND_LINKS for wheels on disk), or keep an installed torch with HEADWISE_REUSE_TORCH=1."
        )
    most = " Most of it is torch." if "torch" in missing else ""
    return f"To download: about {download} MB; on disk: about {disk} MB.{most}"


# What a log of pip says and what that means. The first that fits counts: no network ends in the others.
PIP_FAILURES = [
    (r"\[Errno 28\]|No space left", "The disk is full. Make room and run this again."),
    (r"\[Errno (?:13|30)\]", "pip could not write; the path is above."),
    (
        r"[Cc]onnection ?[Ee]rror|NameResolutionError|name resolution|TimeoutError|Timeout\b|ProxyError|"
        r"SSLError|CERTIFICATE_VERIFY_FAILED|Connection (?:refused|reset)",
        "pip could not reach its package index. Check the network and pip's settings (PIP_INDEX_URL, "
        "PIP_PROXY, PIP_CERT, or PIP_FIND_LINKS for wheels on disk), and run this again.",
    ),
    (
        r"ResolutionImpossible",
        "constraints.txt contradicts other constraints (PIP_CONSTRAINT or pip's files).",
    ),
    (
        r"No matching distribution found for (\S+)",
        "pip finds no {} for this Python and system. Check PIP_INDEX_URL, PIP_NO_INDEX and PIP_FIND_LINKS.",
    ),
]


def advice(log):
    """What to do about a failed pip, from its log."""
    for pattern, text in PIP_FAILURES:
        match = re.search(pattern, log)
        if match:
            return text.format(*match.groups())
    return "Put right what pip says above and run this again."


@contextlib.contextmanager
def one_at_a_time():
    """Hold the only set-up of this checkout; yields the file descriptors that pip has to hold too."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield ()
        return
    (ROOT / "build").mkdir(exist_ok=True)
    with open(str(ROOT / "build" / "setup.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("Another set-up is at work in this folder; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # pip inherits the lock: one that outlives a killed dev.py is waited for, too.
        yield (lock.fileno(),)


def prepare_venv(stamp, reuse_torch, environ):
    """Leave a .venv with a working Python and pip; returns its stamp (unfinished) and its probed Python."""
    if stamp.get("created"):
        whole = stamp.get("finished")
        if not whole or probe(VENV_PYTHON, environ) is None:
            why = "The Python of .venv is gone" if whole else "The last set-up did not finish"
            say(f"{why}: starting .venv over.")
            shutil.rmtree(str(VENV))
            stamp = {}
    if not os.path.lexists(str(VENV)):
        python = find_python(reuse_torch, environ)
        say("Python {}: {}".format(".".join(map(str, python["version"])), python["path"]))
        VENV.mkdir()
        stamp = {"created": True, "reuse_torch": reuse_torch}
        write_stamp(stamp)  # from here on an interruption is noticed
        options = ["--system-site-packages"] if reuse_torch else []
        if subprocess.call([python["path"], "-m", "venv", *options, str(VENV)], cwd=str(ROOT), env=environ):
            raise Problem("Python could not make the environment .venv; its message is above.")
        if reuse_torch and not probe(VENV_PYTHON, environ)["torch"]:
            # That Python is itself in a virtual environment, whose packages a new one does not see.
            (site,) = [folder for folder in VENV.rglob("site-packages") if folder.is_dir()]
            (site / "reused-torch.pth").write_text(python["torch_folder"] + "\n")
    found = probe(VENV_PYTHON, environ)
    reason = "it has no working Python" if found is None else why_not(dict(found, venv=True), False)
    if reason:
        raise Problem(f"{VENV} cannot be used: {reason}. Delete that folder and run this again.")
    if not stamp:
        say("Installing into the .venv that is here already.")
        stamp = {"created": False, "reuse_torch": reuse_torch}
    if stamp["reuse_torch"]:
        if not found["torch"] or numbers(found["torch"]) < LEAST_TORCH:
            torch = found["torch"] or "none"
            raise Problem(f"To reuse a torch, it must be 2.11 or newer; the one in {VENV} is {torch}.")
        say("Keeping torch {} ({}).".format(found["torch"], found["torch_folder"]))
    if not found["pip"] and subprocess.call([str(VENV_PYTHON), "-m", "ensurepip"], env=environ):
        raise Problem(f"{VENV} has no pip. Delete that folder and run this again.")
    return stamp, found


def ensure(extras, reuse_torch, environ):
    """Make sure that .venv has these extras; at once when the stamp says so."""
    if VENV_PYTHON.exists() and ready(read_stamp(), extras, fingerprint(ROOT)):
        return
    with one_at_a_time() as descriptors:
        before = read_stamp()
        if VENV_PYTHON.exists() and ready(before, extras, fingerprint(ROOT)):
            return  # the one we waited for did it
        say(f"Setting up {VENV} (once).")
        stamp, found = prepare_venv(before, reuse_torch, environ)
        had = before.get("extras", []) if before.get("finished") and stamp.get("finished") else []
        extras = [extra for extra in ALL if extra in extras or extra in had]
        missing = [extra for extra in extras if extra not in had]
        missing = missing if found["torch"] else ["torch", *missing]
        pip = [str(VENV_PYTHON), "-m", "pip"]
        if missing:
            config = [*pip, "config", "list"]
            config = subprocess.run(config, check=False, stdout=subprocess.PIPE, env=environ).stdout.decode()
            cuda = sys.platform == "linux" and not has_cpu_torch(config, found["version"][1])
            say(size_note(missing, cuda))

        constraints = "constraints.txt"
        if stamp["reuse_torch"]:
            constraints = str(VENV / "constraints.txt")
            Path(constraints).write_text(pins_for((ROOT / "constraints.txt").read_text(), found["torch"]))
        quiet = [] if sys.stdout.isatty() else ["--quiet", "--progress-bar", "off"]
        if not environ.get("PYTHONDONTWRITEBYTECODE"):
            # saves half a minute: Python compiles what it imports, which is little of what is installed
            quiet.append("--no-compile")
        options = ["--no-input", "--disable-pip-version-check", "--log", str(PIP_LOG), *quiet]
        write_stamp(dict(stamp, finished=False))
        if PIP_LOG.exists():
            PIP_LOG.unlink()  # pip appends
        status = subprocess.call(
            [*pip, "install", *options, "-c", constraints, "-e", ".[{}]".format(",".join(extras))],
            cwd=str(ROOT),
            env=environ,
            **({"pass_fds": descriptors} if descriptors else {}),
        )
        if status:
            if status > 0:  # pip gave up by itself, so what was installed before is still whole
                write_stamp(stamp)
            log = PIP_LOG.read_text(errors="replace") if PIP_LOG.exists() else ""
            raise Problem(f"Installing failed (pip's status is {status}). {advice(log)}\nAll it said: {PIP_LOG}")
        write_stamp(dict(stamp, finished=True, extras=extras, fingerprint=fingerprint(ROOT)))
        say("Set up.")


# --- the commands


def run(module, *arguments, **options):
    """Run a module of .venv; its script would name Python in a first line, where no space is allowed."""
    return subprocess.call([str(VENV_PYTHON), "-m", module, *arguments], **options)


def pytest_calls(everything, extra):
    """The two calls: with every annotation checked as the tests run, and without, for what is compiled."""
    hooked = "not plain" if everything else "not plain and not slow and not gpu"
    plain = "plain" if everything else "plain and not slow"
    return [["--jaxtyping-packages=headwise,examples,beartype.beartype", "-m", hooked, *extra], ["-m", plain, *extra]]


def worst(hooked, plain, chosen):
    """One status of two. No test collected (5) is fine in the second call, or in either for chosen tests."""
    if chosen and hooked == 5:
        hooked = 0 if plain != 5 else 5
    return hooked or (0 if plain == 5 else plain)


def test(everything, extra, environ):
    statuses = [run("pytest", *call, cwd=str(ROOT), env=environ) for call in pytest_calls(everything, extra)]
    return worst(*statuses, chosen=bool(extra))


FORMAT = ["ruff", "format", "--check", "."]
LINT = ["ruff", "check", "."]
TYPES = ["mypy"]
# -E: from scratch, as pages that did not change would keep their warnings to themselves
DOCS = shlex.split("sphinx -W --keep-going -q -E -b html -d build/doctrees docs build/docs")


def check(steps, environ):
    """Run all steps, then say how each went."""
    results = []
    for step in steps:
        say("$ " + " ".join(map(shlex.quote, step)))
        results.append(run(*step, cwd=str(ROOT), env=environ))
    for step, status in zip(steps, results):
        say("{}  {}".format("FAILED" if status else "ok    ", " ".join(step[:2])))
    return 1 if any(results) else 0


def clean():
    """Remove what commands made; a .venv that somebody else made stays."""
    if read_stamp().get("created"):
        shutil.rmtree(str(VENV))
    for name in ["build", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"]:
        shutil.rmtree(str(ROOT / name), ignore_errors=True)
    return 0


def main(arguments):
    split = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, extra = arguments[:split], arguments[split + 1 :]
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        description="\n".join(f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items()),
        epilog="Arguments after -- go on to pytest (test, test-all) or to `headwise look`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument(
        "--reuse-torch",
        action="store_true",
        default=os.environ.get("HEADWISE_REUSE_TORCH", "0") not in {"", "0"},
        help="keep an installed torch of 2.11 or newer (or set HEADWISE_REUSE_TORCH=1) when .venv is made",
    )
    options = parser.parse_args(arguments)
    command, environ = options.command, child_environment(os.environ)
    if command == "clean":
        return clean()
    ensure(COMMANDS[command][1], options.reuse_torch, environ)
    if command == "look":
        # -P: a folder called headwise or torch where the user stands is not ours
        look = ["look", "--model", "minilm", "--png", "heads.png", *extra]
        return subprocess.call([str(VENV_PYTHON), "-P", "-m", "headwise", *look], env=look_environment(os.environ))
    if command in {"test", "test-all"}:
        return test(command == "test-all", extra, environ)
    if command in {"check", "docs"}:
        return check([FORMAT, LINT, TYPES, DOCS] if command == "check" else [DOCS], environ)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Problem as problem:
        sys.exit(f"dev.py: {problem}")
    except KeyboardInterrupt:
        sys.exit("dev.py: interrupted; the next run starts from where it is safe.")
