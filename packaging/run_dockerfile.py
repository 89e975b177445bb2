"""Runs a Dockerfile's steps in order where no container runtime is, then starts what it starts and asks it.

    sudo python3.12 packaging/run_dockerfile.py packaging/Dockerfile

Each stage is a writable layer (overlayfs) above this machine's root, with the Python that runs this script in
/usr/local: both stand for the base image, so a Debian of its release and a Python of its version come closest. RUN is
`sh -c` in a chroot, as the stage's USER. At the end the root is made read-only, with a tmpfs on /tmp and a new folder
on each VOLUME; ENTRYPOINT and CMD run as USER, in a network of their own with the loopback device alone, until
HEALTHCHECK's command succeeds and a chat is answered. Needs Linux and root, and Python's own library alone.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

CHAT = """
import json, urllib.request
body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}
headers = {"Content-Type": "application/json", "Authorization": "Bearer SECRET"}
asked = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"])
"""
SCRATCH = "RUN_DOCKERFILE_SCRATCH"  # set in the process that has the mounts
RETRY_SECONDS = 30.0  # Docker gives a container three tries more, ten seconds apart
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
IGNORED = shutil.ignore_patterns("__pycache__")  # as .dockerignore has it


class StepFailed(Exception):
    pass


@dataclass
class Stage:
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    start_period: float = 60.0
    stop_signal: int = signal.SIGTERM

    def path(self, inside: str) -> Path:
        """Of a path in the image, relative to WORKDIR."""
        return self.root / os.path.normpath(os.path.join(self.workdir, inside)).lstrip("/")

    def command(self, arguments: list[str]) -> list[str]:
        user = f"{self.user}:{self._group()}"
        line = ["chroot", f"--userspec={user}", "--groups=", str(self.root), "/usr/bin/env", "-i"]
        line += [f"{name}={value}" for name, value in self.env.items()]
        return [*line, "sh", "-c", f'cd {shlex.quote(self.workdir)} && exec "$@"', "sh", *arguments]

    def _group(self) -> int:
        lines = (self.root / "etc/passwd").read_text().splitlines()
        found = [entry.split(":") for entry in lines]
        return next((int(one[3]) for one in found if self.user in (one[0], one[2])), 0)


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and value of each, with lines that go on joined, and without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    split = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name.upper(), value.strip()) for name, _, value in split]


class Build:
    def __init__(self, scratch: Path, context: Path) -> None:
        self._scratch = scratch
        self._context = context
        self._stages: dict[str, Stage] = {}
        self.stage: Stage | None = None

    def run(self, name: str, value: str) -> None:
        step = getattr(self, f"do_{name.lower()}", None)
        if step is None:
            raise StepFailed(f"{name} is not known to this script")
        step(value)

    @property
    def now(self) -> Stage:
        if self.stage is None:
            raise StepFailed("a Dockerfile begins with FROM")
        return self.stage

    def do_from(self, value: str) -> None:
        image, _, name = value.partition(" AS ")
        folder = self._scratch / f"stage{len(self._stages)}"
        for part in ("upper", "work", "root"):
            (folder / part).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
        _mount("-t", "overlay", "overlay", "-o", layers, folder / "root")
        _mount_system(folder / "root")
        kept = {name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy") or name[:4] == "PIP_"}
        path = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
        self.stage = Stage(folder / "root", kept | {"PATH": path, "HOME": "/root"})
        self._stages[name or str(len(self._stages))] = self.stage
        _put_python(self.stage)
        say(f"    {image} stands for: this machine's root, with Python {sys.version.split()[0]}")

    def do_workdir(self, value: str) -> None:
        self.now.path(value).mkdir(parents=True, exist_ok=True)
        self.now.workdir = os.path.join(self.now.workdir, value)

    def do_copy(self, value: str) -> None:
        parts = shlex.split(value)
        source, ignore = self._context, IGNORED
        if parts[0].startswith("--from="):
            source, ignore = self._stages[parts.pop(0).removeprefix("--from=")].root, None
        *names, place = parts
        target = self.now.path(place)
        for name in names:
            found = source / name.lstrip("/")
            if found.is_dir():
                shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True, ignore=ignore)
            else:
                (target if place.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, target)

    def do_run(self, value: str) -> None:
        ended = subprocess.run(self.now.command(["sh", "-c", value]))
        if ended.returncode:
            raise StepFailed(f"it ended with {ended.returncode}")

    def do_env(self, value: str) -> None:
        for pair in shlex.split(value):
            name, _, text = pair.partition("=")
            expand = re.sub(r"\$\{?(\w+)\}?", lambda found: self.now.env.get(found[1], ""), text)
            self.now.env[name] = expand

    def do_user(self, value: str) -> None:
        self.now.user = value

    def do_volume(self, value: str) -> None:
        self.now.volumes.append(value)
        self.now.path(value).mkdir(parents=True, exist_ok=True)

    def do_expose(self, value: str) -> None:
        pass

    def do_stopsignal(self, value: str) -> None:
        self.now.stop_signal = getattr(signal, value)

    def do_healthcheck(self, value: str) -> None:
        if period := re.search(r"--start-period=(\d+)s", value):
            self.now.start_period = float(period[1])
        self.now.healthcheck = json.loads(value[value.index("CMD") + 3 :])

    def do_entrypoint(self, value: str) -> None:
        self.now.entrypoint = json.loads(value)

    def do_cmd(self, value: str) -> None:
        self.now.cmd = json.loads(value)


def start(stage: Stage, variables: dict[str, str], scratch: Path) -> None:
    """As `docker run --read-only --tmpfs /tmp -v NEW:/data -e …` would, and asks it."""
    stage.env |= variables
    for number, volume in enumerate(stage.volumes):
        inside, outside = stage.path(volume), scratch / f"volume{number}"
        outside.mkdir()
        shutil.copystat(inside, outside)
        os.chown(outside, inside.stat().st_uid, inside.stat().st_gid)  # a new volume is as the image has the folder
        _mount("--bind", outside, inside)
    _mount("-t", "tmpfs", "tmpfs", stage.root / "tmp")
    (stage.root / "tmp").chmod(0o1777)
    _mount("-o", "remount,ro,bind", stage.root)
    command = stage.command([*stage.entrypoint, *stage.cmd])
    loopback = 'ip link set lo up && exec "$@"'
    process = subprocess.Popen(["unshare", "--net", "sh", "-c", loopback, "sh", *command])
    try:
        _wait_until_healthy(stage, process)
        uid = Path(f"/proc/{process.pid}/status").read_text().split("Uid:")[1].split()[0]
        say(f"it runs as user {uid}, and the health check succeeds")
        answer = _within(process, stage.command(["python", "-c", CHAT]))
        say(f"a chat is answered with: {answer.stdout.strip()}")
        written = subprocess.run(["chroot", stage.root, "touch", "/x"], capture_output=True, text=True)
        say(f"writing to the root, even as root: {written.stderr.strip() or 'it is allowed'}")
        if answer.returncode or not written.returncode:
            raise StepFailed(f"the server does not work as it should: {answer.stderr}")
    finally:
        process.send_signal(stage.stop_signal)
        code = process.wait(60)
    say(f"it ended with {code}")


def _within(process: "subprocess.Popen[bytes]", command: list[str]) -> "subprocess.CompletedProcess[str]":
    """In the network of the process."""
    line = ["nsenter", f"--net=/proc/{process.pid}/ns/net", *command]
    return subprocess.run(line, capture_output=True, text=True)


def _wait_until_healthy(stage: Stage, process: "subprocess.Popen[bytes]") -> None:
    patience = stage.start_period + RETRY_SECONDS
    deadline = time.monotonic() + patience
    while _within(process, stage.command(stage.healthcheck)).returncode:
        if process.poll() is not None:
            raise StepFailed(f"the server ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise StepFailed(f"it is not healthy after {patience:g} s")
        time.sleep(1)


def _put_python(stage: Stage) -> None:
    """The running Python, without what was installed into it, as /usr/local: where the official images have it."""
    prefix, local = Path(sys.base_prefix), stage.root / "usr/local"
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    unwanted = shutil.ignore_patterns("site-packages", "test", "__pycache__")
    shutil.copytree(prefix / "lib" / name, local / "lib" / name, symlinks=True, dirs_exist_ok=True, ignore=unwanted)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(library, local / "lib", follow_symlinks=False)
    (local / "bin").mkdir(exist_ok=True)
    shutil.copy2(prefix / "bin" / name, local / "bin" / name)
    for alias in ("python", "python3"):
        (local / "bin" / alias).unlink(missing_ok=True)
        (local / "bin" / alias).symlink_to(name)
    subprocess.run(["chroot", str(stage.root), "ldconfig"], check=True)


def _mount_system(root: Path) -> None:
    """What a container has of the machine: processes, and the devices that every program expects."""
    _mount("-t", "proc", "proc", root / "proc")
    _mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    _mount("-t", "tmpfs", "tmpfs", root / "dev")
    for device in DEVICES:
        (root / "dev" / device).touch()
        _mount("--bind", f"/dev/{device}", root / "dev" / device)
    (root / "dev/shm").mkdir()
    (root / "dev/shm").chmod(0o1777)


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def build_and_start(dockerfile: Path, context: Path, scratch: Path, *, starts: bool) -> int:
    build = Build(scratch, context)
    for name, value in instructions(dockerfile.read_text()):
        begun = time.monotonic()
        say(f"{name} {value}")
        try:
            build.run(name, value)
        except StepFailed as error:
            say(f"FAILED: {name} {value}: {error}")
            return 1
        if (seconds := time.monotonic() - begun) > 1:
            say(f"    {seconds:.0f} s")
    try:
        if starts:
            start(build.now, {"PARALLM_API_KEY": "SECRET"}, scratch)
    except StepFailed as error:
        say(f"FAILED: {error}")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--context", type=Path, default=Path(), help="folder that COPY reads (default: this one)")
    parser.add_argument("--no-start", action="store_true", help="only the steps: the server needs a GPU, for example")
    args = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        parser.error("this needs Linux, and root for the chroot: sudo")
    if inside := os.environ.get(SCRATCH):
        return build_and_start(args.dockerfile, args.context.resolve(), Path(inside), starts=not args.no_start)
    # Mounts and processes of its own end with it, before the folder is removed: nothing is mounted there then.
    scratch = tempfile.mkdtemp(prefix="dockerfile-")
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    try:
        return subprocess.run([*unshare, sys.executable, *sys.argv], env=os.environ | {SCRATCH: scratch}).returncode
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main())
