"""What runs in a submission's own process: its cells, one after the other, under limits and under a guard.

``run`` starts the process, which is this file again. It reads a job from its standard input, and answers a line of JSON
for each cell, as soon as the cell is done. What cells print goes nowhere: the check's message is in the answer.

The guard is an audit hook: it is told of what Python code opens, starts and connects to, and refuses what no exercise
needs. It is no jail. It does not see what compiled code opens by itself (`torch.save`, safetensors), and code that sets
out to leave this process or to rewrite our checks can do so: it has the same rights. For a class that you cannot trust,
run tools/grade.py in a container without a network. Windows has neither `SIGALRM` nor `resource`: there a cell that
runs too long costs a new process, and memory and files have no limit. macOS does not keep to the memory limit.
"""

import builtins
import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from secrets import token_hex

import psutil

if sys.platform != "win32":
    import resource

HEAVY = "torch.nn.functional", "matplotlib.pyplot", "specdec_lite.checks"  # seconds: before the clock runs
KEPT_AS_THEY_ARE = {"builtins", "json", "math", "os", "signal", "numpy", "torch", "torch.nn.functional"}
CHANGES = set("os.chdir os.chmod os.link os.mkdir os.remove os.rename os.rmdir os.symlink os.truncate".split())  # noqa: SIM905
REFUSED = tuple(  # the beginnings of their names
    "ctypes. os.exec os.fork os.kill os.posix_spawn os.spawn os.startfile os.system resource. socket. sqlite3."  # noqa: SIM905
    " subprocess. _winapi.".split()
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OUT_OF_MEMORY = 77  # the exit status that says so


@dataclass(frozen=True)
class Limits:
    """In seconds and bytes. ``start``: for the imports. ``grace``: how late a cell may notice that its time is up."""

    cell: float = 60
    total: float = 600
    start: float = 300
    grace: float = 5
    memory: int = 4 * 2**30
    file: int = 100 * 2**20


class NotGraded(Exception):
    """A submission, or the whole class, for the reason that the message gives."""


class TimeUp(BaseException):
    """A cell's time is up. No Exception, so that `except Exception` does not hold it up."""


def run(steps: list[dict], limits: Limits, roots: dict[str, bool]) -> dict[str, dict]:
    """Run cells ({"name", "kind", "source"}) in as few processes as they need; the answers, by the cells' names.

    A cell in which a process ended, or had to be killed, is left out of the next. First answers count.
    """
    answers: dict[str, dict] = {}
    end = time.monotonic() + limits.total
    while True:
        with tempfile.TemporaryDirectory(prefix="grade-", ignore_cleanup_errors=True) as folder:
            lost = attempt(steps, limits, roots, folder, end, answers)
        steps = [step for step in steps if step is not lost]
        if lost is None or time.monotonic() >= end:
            late = result(f"not run: the {limits.total:g} s for all cells were used up")
            return {step["name"]: late for step in steps} | answers


def attempt(steps: list[dict], limits: Limits, roots: dict, folder: str, end: float, answers: dict) -> dict | None:
    """Run cells in one process and add what it answers. Returns the cell in which it ended, if it did."""
    with tempfile.TemporaryFile() as job:
        key = token_hex()  # what a learner's code writes into every open file is no answer
        rest = {"limits": asdict(limits), "roots": roots, "parent": os.getpid(), "key": key}
        job.write(json.dumps({"steps": steps, **rest}).encode("utf-8"))
        job.seek(0)
        command = [sys.executable, "-I", "-B", "-X", "utf8", os.path.abspath(__file__)]
        os.mkdir(empty := os.path.join(folder, "work"))  # what libraries leave at home is beside it
        settings: dict = {"cwd": empty, "env": environment(folder), "start_new_session": True}
        process = subprocess.Popen(command, stdin=job, stdout=subprocess.PIPE, **settings)
    with process:
        try:
            if next_answer(process, limits.start, key) is None:
                raise NotGraded("a process did not start; what it said stands above. `specdec doctor` may know more")
            for step in steps:
                seconds = max(0, min(limits.cell + limits.grace, end - (began := time.monotonic())))
                answer = next_answer(process, seconds, key)
                if answer is not None:
                    answers.setdefault(step["name"], answer)
                    continue
                killed = time.monotonic() - began >= seconds
                kill(process)
                end_of = "it ran out of memory" if process.wait() == OUT_OF_MEMORY else "it ended the process"
                answers.setdefault(step["name"], result(f"killed after {seconds:.0f} s" if killed else end_of))
                return step
        finally:
            kill(process)


def result(error: str | None = None, refused: Sequence[str] = ()) -> dict:
    """What there is to say on a cell. No error: a check was passed."""
    return {"error": error, "refused": list(refused)}


def next_answer(process: subprocess.Popen, seconds: float, key: str) -> dict | None:
    """A process's next answer. None if it ended, broke the rules, or said nothing for so long that it was killed."""
    timer = threading.Timer(seconds, kill, [process])
    timer.start()
    line = process.stdout.readline(10**6)  # type: ignore[union-attr]
    timer.cancel()
    try:
        return json.loads(line)[key]
    except (ValueError, LookupError, TypeError):
        return None


def kill(process: subprocess.Popen) -> None:
    """Stop a process, and what it may have started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


def environment(folder: str) -> dict[str, str]:
    """All that a learner's code finds in its environment."""
    import matplotlib.font_manager  # on a new machine this looks for fonts: here, where it may write down what it found

    own = dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), folder)
    fixed = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "MPLBACKEND": "Agg"}
    needed = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    return {**own, **fixed, **needed, "MPLCONFIGDIR": matplotlib.get_cachedir()}


def guard(folder: str, roots: dict[str, bool]) -> list[str]:
    """From now on refuse what is not allowed, with a ``PermissionError``. Returns the list that refusals are noted in.

    ``roots``: path -> may it be read? The longest around a path decides, or else yes. Only ``folder`` may be written.
    """
    real = {resolve(root): readable for root, readable in roots.items()}
    own, nowhere = resolve(folder), resolve(os.devnull)
    refusals: list[str] = []
    real |= dict.fromkeys(map(resolve, (own, "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat")), True)

    def refuse(what: str) -> None:
        if len(refusals) < 5 and what not in refusals:
            refusals.append(what)
        raise PermissionError(f"{what} is not allowed while grading")

    def may_read(path: str) -> bool:
        return real[max((root for root in real if within(path, root)), key=len, default=own)]

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and not isinstance(arguments[0], int):
            path, mode, flags = resolve(arguments[0]), *arguments[1:]
            # An opened folder is a way to write below it under another name, so it must be the learner's own.
            writes = flags & WRITING or (mode is None and os.path.isdir(path))
            if writes and not within(path, own) and path != nowhere:
                refuse(f"writing to {path}")
            if not may_read(path):
                refuse(f"reading {path}")
        elif event in CHANGES:
            for path in [resolve(name) for name in arguments if isinstance(name, str | bytes | os.PathLike)]:
                if not within(path, own):
                    refuse(f"{event} of {path}")
        elif event in ("os.listdir", "os.scandir") and not isinstance(arguments[0], int | None):
            if not may_read(path := resolve(arguments[0])):
                refuse(f"listing {path}")
        elif event.startswith(REFUSED) and event != "socket.__new__":
            refuse(event)

    sys.addaudithook(hook)
    return refusals


def resolve(path: str | bytes | os.PathLike) -> str:
    return os.path.normcase(os.path.realpath(os.fsdecode(path)))


def within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def limit(memory: int, file: int) -> None:
    """At most ``memory`` bytes in all, and no file longer than ``file`` bytes."""
    if sys.platform == "win32":
        return
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, file), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS refuses some, and the machine's own limit may be lower
            resource.setrlimit(what, (most, most))


def remember() -> dict:
    """name -> (module, what its names mean now), for every module that a check relies on. See ``restore``."""
    for found in pkgutil.iter_modules(sys.modules["specdec_lite.checks"].__path__, "specdec_lite.checks."):
        importlib.import_module(found.name)
    names = KEPT_AS_THEY_ARE | {name for name in sys.modules if name.split(".")[0] == "specdec_lite"}
    return {name: (module := importlib.import_module(name), dict(vars(module))) for name in names}


def restore(remembered: dict) -> None:
    """Names that a learner's code gave another meaning get their own back, so that a check is the one we wrote."""
    for name, (module, names) in remembered.items():
        sys.modules[name] = module
        vars(module).update(names)


def new_shell():
    """IPython without history: magics work, what a cell returns is not kept, and nothing prints tracebacks."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    settings = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"cache_size": 0}})
    shell = InteractiveShell.instance(config=settings)
    shell.enable_gui = shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None
    return shell


def timed(run: Callable[[], BaseException | None], seconds: float) -> BaseException | None:
    """The error that ``run`` returns or raises; ``TimeUp`` if it does not end in time."""

    def stop(*_: object) -> None:
        raise TimeUp(f"stopped after {seconds:g} s")

    try:
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, seconds)
        return run()
    except BaseException as error:
        return error
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def describe(error: BaseException, seconds: float) -> str:
    """An error in one line. Its text is the learner's code, so it has a time limit too."""
    said: list[str] = []
    timed(lambda: said.append(" ".join(str(error).split())), seconds)
    return ": ".join([type(error).__name__, *filter(None, said)])


def leave_with(parent: int, folder: str) -> None:
    """Wait for the end of the process that started this one, which may have been killed; then clean up, and end too."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    job = json.load(sys.stdin)
    threading.Thread(target=leave_with, args=(job["parent"], os.environ["HOME"]), daemon=True).start()
    limits, key, seconds = job["limits"], job["key"], job["limits"]["cell"]
    answers, nowhere = os.fdopen(os.dup(1), "w", encoding="utf-8"), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    for name in HEAVY:
        importlib.import_module(name)
    shell, remembered = new_shell(), remember()
    os.dup2(nowhere, 2)  # only now: if something is not installed, the instructor sees it
    limit(psutil.Process().memory_info().vms + limits["memory"], limits["file"])
    refusals = guard(os.environ["HOME"], job["roots"])

    def run(step: dict) -> BaseException | None:
        if step["kind"] != "check":
            result = shell.run_cell(step["source"])
            return result.error_before_exec or result.error_in_exec
        # Without IPython, which a learner's code can teach to read a check in another way.
        shell.user_ns["__builtins__"] = builtins
        return exec(compile(step["source"], f"<{step['name']}>", "exec"), shell.user_ns)

    tell = partial(print, file=answers, flush=True)
    tell(json.dumps({key: result()}))
    for step in job["steps"]:
        restore(remembered)
        error = timed(partial(run, step), seconds)
        restore(remembered)
        said = None if error is None else describe(error, seconds)
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in (said or ""):
            os._exit(OUT_OF_MEMORY)  # what filled it may still be there: the other cells get a new process
        tell(json.dumps({key: result(said and said[:300], refusals)}))
        refusals.clear()
    os._exit(0)  # not waiting for threads that a cell left behind


if __name__ == "__main__":
    main()
