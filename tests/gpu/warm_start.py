"""What `--bank-cache` saves: seconds of a cold and of a warm start of a checkpoint on disk, experts in host memory.

    python -m tests.gpu.warm_start --out FILE [--model GEOMETRY] [--folder ON_DISK] [--banks DIR] [--limit-s 180]

A checkpoint of made-up weights is written first, a file a layer, alike but for names, as many layers as `--write-s`
allow (a multiple of four); meanwhile a start of four layers compiles the kernels, and memory is touched once, which a
virtual machine may have to ask its host for. Then it is started, each time in a process of its own, timed from the
start of `build_rank` until it is ready to serve:

    cold      without banks, the page cache dropped
    warm      with the banks that the cold start left, the page cache dropped again
    cached    without banks, the checkpoint in the system's page cache (unless --no-cached)

Banks go to tmpfs if that holds them, else to disk. The first tokens of all must be equal. `write` and `starts` in place
of nothing do one half each: the first makes no use of a GPU but for compiling.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.index import TensorInfo
from shardwise.checkpoint.synth import DummySource
from shardwise.config import RankEnvironment, ServeConfig
from shardwise.engine import build as building
from shardwise.engine import experts as engine_experts
from shardwise.experts import bank, store
from tests.gpu.engine_case import generate

WRITERS = 4
INTERVAL = 4  # layers after which kinds repeat
WARM_LAYERS, WARM_SLOTS = 4, 120
CARD_GIB = 24.0
NAMES, FACTS = ("cold", "warm", "cached"), "written.json"
LAYER, EXPERT = re.compile(r"\blayers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")
EXPERTS, LARGE_ELEMENTS = 8, 1 << 22  # that are made up: the others are like them
GIB = 1 << 30


def made(source: DummySource, name: str, info: TensorInfo) -> torch.Tensor:
    """The bytes of a tensor; of a large one the first rows are repeated."""
    rows = max(1, LARGE_ELEMENTS * info.shape[0] // _elements(info)) if info.shape else 1
    if not info.shape or rows >= info.shape[0]:
        return source.whole(name).reshape(-1).view(torch.uint8)
    first = source.read(name, (slice(0, rows), *(slice(0, size) for size in info.shape[1:])))
    return (
        first.repeat(-(-info.shape[0] // rows), *(1 for _ in info.shape[1:]))
        .reshape(-1)
        .view(torch.uint8)[: info.nbytes]
    )


class Kind:
    """Contents of a file: the bytes of its tensors, largest elements first, without the number of the layer."""

    def __init__(self, source: DummySource, names: list[str], known: dict[str, torch.Tensor]) -> None:
        infos = [(name, source.info(name)) for name in names]
        self.infos = sorted(infos, key=lambda one: -(one[1].nbytes // max(1, _elements(one[1]))))
        self.bytes = torch.empty(sum(info.nbytes for _, info in infos), dtype=torch.uint8)
        at = 0
        for name, info in self.infos:
            key = EXPERT.sub(lambda found: f".experts.{int(found[1]) % EXPERTS}.", LAYER.sub("layers.N.", name))
            if key not in known:
                known[key] = made(source, name, info)
            self.bytes[at : at + info.nbytes] = known[key]
            at += info.nbytes

    def write(self, path: Path, layer: int | None) -> None:
        """As a safetensors file, on the disk when this returns."""
        header, at = dict[str, Any](), 0
        for name, info in self.infos:
            own = name if layer is None else LAYER.sub(f"layers.{layer}.", name)
            header[own] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [at, at + info.nbytes]}
            at += info.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            for part in (memoryview(len(text).to_bytes(8, "little") + text), self.bytes.numpy().data):
                done = 0
                while done < len(part):
                    done += os.write(descriptor, part[done : done + (64 << 20)])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _elements(info: TensorInfo) -> int:
    return int(torch.Size(info.shape).numel())


def config_of(geometry: Path, layers: int) -> dict[str, Any]:
    """The geometry's config.json with fewer layers."""
    raw = json.loads((geometry / "config.json").read_text())
    text = raw.get("text_config", raw)
    text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    return raw


def write_checkpoint(folder: Path, geometry: Path, seconds: float) -> dict[str, Any]:
    """Layers of made-up weights on disk, as many as the time and the disk allow; how many, their bytes, the time."""
    begin_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    serve = ServeConfig(model=str(geometry), load_format="dummy", vision="off", ranks=1)
    made = building.blueprint(serve, "cuda")
    source = DummySource(made.specs.values())
    by_layer = dict[int | None, list[str]]()
    for name in source.names:
        found = LAYER.search(name)
        by_layer.setdefault(int(found[1]) if found else None, []).append(name)
    known, kinds, paths = dict[str, torch.Tensor](), dict[tuple[str, ...], Kind](), dict[int, Path]()
    outer = Kind(source, by_layer.pop(None), {})
    layer_bytes = 0
    with ThreadPoolExecutor(WRITERS) as pool:
        todo = [pool.submit(outer.write, folder / "outer.safetensors", None)]

        def put(kind: Kind, layer: int) -> None:
            if time.monotonic() - begin_s < seconds and shutil.disk_usage(folder).free > 2 * WRITERS * len(kind.bytes):
                path = folder / f"layer{layer:03}.safetensors"
                kind.write(path, layer)
                paths[layer] = path

        for layer, names in sorted(by_layer.items(), key=lambda one: one[0] or 0):
            assert layer is not None
            key = tuple(LAYER.sub("layers.N.", name) for name in names)
            kinds[key] = kinds.get(key) or Kind(source, names, known)
            layer_bytes = max(layer_bytes, len(kinds[key].bytes))
            todo.append(pool.submit(put, kinds[key], layer))
        for each in todo:
            each.result()
    layers = next((n for n in range(len(by_layer)) if n not in paths), len(by_layer))
    layers -= layers % INTERVAL if layers < len(by_layer) else 0
    for layer, path in paths.items():
        if layer >= layers:
            path.unlink()
    (folder / "config.json").write_text(json.dumps(config_of(geometry, layers)))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return {"layers": layers, "of": len(by_layer), "bytes": size, "seconds": time.monotonic() - begin_s}


def cached_bytes() -> int:
    """What the system keeps of files on disk."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(sign * int(facts[name].split()[0]) for name, sign in (("Cached", 1), ("Shmem", -1))) * 1024


def drop(folder: Path) -> tuple[int, int]:
    """Drop `folder`'s pages, and all others if we may; what was kept before and after."""
    before = cached_bytes()
    os.sync()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        print(f"only the checkpoint's own pages are dropped ({error.strerror})", flush=True)
    return before, cached_bytes()


def bank_folder(given: str, folder: Path, need_bytes: int) -> Path:
    """Where banks go: as given, else tmpfs if it holds them (made larger if we may), else beside the checkpoint."""
    if given:
        return Path(given) / "shardwise-banks"
    shared = Path("/dev/shm")
    if shutil.disk_usage(shared).free < need_bytes + GIB:
        wanted = (need_bytes >> 30) + 4
        subprocess.run(["mount", "-o", f"remount,size={wanted}G", str(shared)], check=False, capture_output=True)
    free = shutil.disk_usage(shared).free
    print(f"/dev/shm: {free / GIB:.1f} GiB free, banks need {need_bytes / GIB:.1f}", flush=True)
    return (shared if free > need_bytes + GIB // 4 else folder.parent) / "shardwise-banks"


class Parts:
    """Seconds of named functions, by wrapping them where they are looked up."""

    def __init__(self) -> None:
        self.seconds, self.ended = dict[str, float](), dict[str, float]()
        self._begin_s = time.monotonic()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        right: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return right(*args, **kwargs)
            finally:
                ended_s = time.monotonic()
                self.seconds[name] = self.seconds.get(name, 0.0) + ended_s - begin_s
                self.ended[name] = ended_s - self._begin_s

        setattr(owner, attribute, timed)


WRAPPED = (
    (building, "blueprint", "headers"), (building, "load", "weights beside experts"),
    (engine_experts, "bank_key", "key of the bank"), (bank, "take", "take memory"), (bank, "pin", "page-lock"),
    (store._Store, "read", "read the bank"), (bank, "load", "build the bank"),
    (store._Store, "write", "write the bank"), (building, "budget", "trial step, slots"),
    (building, "allocate", "caches"), (building.Runner, "capture", "graphs"),
)  # fmt: skip


def start(args: argparse.Namespace) -> dict[str, Any]:
    """One start in this process: its parts, the whole, and the first tokens."""
    on_gpu = args.device != "cpu"
    share = 0.9
    if on_gpu:
        share = min(0.95, 0.95 * CARD_GIB * GIB / torch.cuda.get_device_properties(0).total_memory)
    serve = ServeConfig(
        model=str(args.folder), ranks=1, device=args.device, vision="off", experts="offload", max_model_len=8192,
        kv_tokens=8192, bank_cache=args.banks, gpu_memory_utilization=share, expert_slots=args.slots,
        load_format="dummy" if args.dummy else "auto",
    )  # fmt: skip
    parts = Parts()
    for each in WRAPPED:
        parts.wrap(*each)
    begin_s = time.monotonic()
    one = building.build_rank(serve, RankEnvironment(0, 1, 0, 1, 0))
    if on_gpu:
        torch.cuda.synchronize()
    ready_s = time.monotonic() - begin_s
    leader = building.Leader(one, serve)
    tokens = generate(leader, [([5 + 7 * n for n in range(40)], 8)] * 2)
    leader.stop()
    offload = one.offload
    assert offload is not None
    return {
        "ready_s": ready_s, "parts_s": parts.seconds, "ended_s": parts.ended, "tokens": tokens,
        "slots": offload.count, "direct": offload.direct,
        "bank_bytes": sum(each.nbytes for each in offload.banks.values()),
    }  # fmt: skip


class Driver:
    """Processes of single starts, one at a time, none of which outlives the script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self._end_s = args, time.monotonic() + args.limit_s
        self.running: subprocess.Popen[str] | None = None

    def spawn(self, name: str, folder: Path, banks: str = "", slots: int = 0, dummy: bool = False) -> Path:
        out = self.args.out.with_suffix(f".{name}.json")
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.gpu.warm_start", "one", "--folder", str(folder), "--out", str(out)]
        command += ["--banks", banks, "--device", self.args.device, "--slots", str(slots), *["--dummy"] * dummy]
        self.running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        return out

    def result(self, name: str, out: Path) -> dict[str, Any]:
        assert self.running is not None
        begin_s = time.monotonic()
        try:
            said, _ = self.running.communicate(timeout=max(1.0, self._end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            said = "cut off by the limit"
        self.running = None
        found = json.loads(out.read_text()) if out.exists() else {"error": said[-1500:]}
        waited_s = time.monotonic() - begin_s
        print(f"{name}: {waited_s:.1f} s, ready {found.get('ready_s', 0):.2f} s {found.get('error', '')}", flush=True)
        return found

    def kill(self) -> None:
        if self.running is not None and self.running.poll() is None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()


def touch(size_gib: int) -> None:
    """Use so much memory once, and give it back."""
    kept = [torch.ones(GIB, dtype=torch.uint8) for _ in range(size_gib)]
    kept.clear()


def write(driver: Driver, folder: Path) -> None:
    """The checkpoint, its facts beside it, and compiled kernels."""
    args, small = driver.args, folder.parent / f"{folder.name}-small"
    small.mkdir(parents=True, exist_ok=True)
    (small / "config.json").write_text(json.dumps(config_of(args.model, WARM_LAYERS)))
    compiling = driver.spawn("compile", small, slots=min(args.slots or WARM_SLOTS, WARM_SLOTS), dummy=True)
    written = write_checkpoint(folder, args.model, args.write_s)
    (folder / FACTS).write_text(json.dumps(written))
    print(f"checkpoint: {json.dumps(written)}", flush=True)
    driver.result("compile", compiling)
    touch(args.touch_gib)


def measure(driver: Driver, folder: Path) -> dict[str, Any]:
    """The starts of what `write` left."""
    args, written = driver.args, json.loads((folder / FACTS).read_text())
    banks = bank_folder(args.banks, folder, written["bytes"])
    found: dict[str, Any] = {"checkpoint": written, "banks": str(banks)}
    for name in NAMES if args.cached else NAMES[:2]:
        if name != "warm":
            shutil.rmtree(banks, ignore_errors=True)
        if name != "cached":
            found[f"{name}_dropped"] = drop(folder)
        found[name] = driver.result(name, driver.spawn(name, folder, str(banks), args.slots))
    shutil.rmtree(banks, ignore_errors=True)
    return found


def table(found: Mapping[str, Any]) -> list[str]:
    names = [name for name in NAMES if "ready_s" in found.get(name, {})]
    rows = list(dict.fromkeys(part for name in names for part in found[name]["parts_s"]))
    written = found["checkpoint"]
    lines = [
        f"{written['layers']} of {written['of']} layers, {written['bytes'] / GIB:.1f} GiB, written in "
        f"{written['seconds']:.0f} s; banks in {found['banks']}",
        f"{'seconds':24}" + "".join(f"{name:>9}" for name in names),
    ]
    lines += [f"{row:24}" + "".join(f"{found[name]['parts_s'].get(row, 0):9.2f}" for name in names) for row in rows]
    lines.append(f"{'ready':24}" + "".join(f"{found[name]['ready_s']:9.2f}" for name in names))
    writing = [found[name]["ready_s"] - found[name]["parts_s"].get("write the bank", 0) for name in names]
    lines.append(f"{'ready without writing':24}" + "".join(f"{each:9.2f}" for each in writing))
    if {"cold", "warm"} <= {*names}:
        warm_s, cold_s, bare_s = found["warm"]["ready_s"], found["cold"]["ready_s"], writing[names.index("cold")]
        built = "build the bank" in found["warm"]["parts_s"]
        lines.append(
            f"warm / cold: {warm_s / cold_s:.3f}, without writing {warm_s / bare_s:.3f} (at most 0.333 asked)"
            + (", but the bank was BUILT AGAIN" if built else "")
        )
    tokens = [found[name]["tokens"] for name in names]
    lines.append(f"first tokens {'equal' if tokens and all(each == tokens[0] for each in tokens) else 'DIFFERENT'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "write", "starts", "one"])
    parser.add_argument("--model", type=Path, default=Path("benchmarks/geometry/qwen3.6-35b-a3b-fp8"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/shardwise-warm/model"))
    parser.add_argument("--banks", default="")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=0, help="of each layer; 0: what a card of 24 GiB holds")
    parser.add_argument("--write-s", type=float, default=50.0)
    parser.add_argument("--touch-gib", type=int, default=0)
    parser.add_argument("--no-cached", dest="cached", action="store_false")
    parser.add_argument("--limit-s", type=int, default=180)
    parser.add_argument("--dummy", action="store_true")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "one":
        signal.alarm(args.limit_s)
        args.out.write_text(json.dumps(start(args)))
        return
    driver, folder = Driver(args), args.folder
    try:
        if args.what != "starts":
            write(driver, folder)
        if args.what != "write":
            found = measure(driver, folder)
            args.out.write_text(json.dumps(found))
            print("\n".join(table(found)))
    finally:
        driver.kill()
        if args.what != "write":
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
