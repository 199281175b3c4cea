"""`shardwise serve`: the API process and its ranks.

On one host, this process is the API process: it binds the port, checks everything that can be checked without weights,
starts torch's elastic launcher as its child (engine/group.py) and answers over HTTP.

Over several hosts, `torchrun --nnodes 2 --nproc-per-node 4 ... -m shardwise serve MODEL` starts this command once a
rank. Inside such a group it becomes the rank (engine/worker.py), and the first rank starts the API process beside it,
with `--attach`. That one outlives a rank that dies: it is found again by the first rank of the next group, tells its
clients of the loss meanwhile, and leaves when the launcher of its host does. See docs/multi-node.md.
"""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from shardwise.commands.prepare import (
    check_grammar_backend,
    check_pictures,
    check_split,
    generation_settings,
    resolve_model,
    set_up_logging,
    settle_split,
)
from shardwise.config import STORE_PER_GROUP, ConfigError, RankEnvironment, ServeConfig, rank_environment
from shardwise.engine.client import EngineClient, EngineFailed
from shardwise.engine.folder import RunFolder
from shardwise.engine.group import EngineGroup, run_folder, supervise
from shardwise.engine.processes import alive, die_with_parent, watch
from shardwise.engine.worker import DEFAULT_ENGINE, leave, run_rank, set_up_process

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
KEEP_ALIVE_SECONDS = 75  # longer than what clients and proxies keep: a request that meets a closing connection is lost


def run(options: argparse.Namespace, config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT: 0 after draining, 1 if the engine stopped for good. Raises ConfigError."""
    engine = options.engine or DEFAULT_ENGINE
    environment = None if options.attach else rank_environment()
    if environment is not None:
        leave(run_in_group(config, environment, engine))
    if options.parent:
        die_with_parent(options.parent)
    set_up_logging(config)
    if options.attach:
        watch(lambda: not alive(options.launcher), lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            with bind(config) as listener:
                return asyncio.run(serve(config, RunFolder(options.attach), None, listener))
        finally:
            shutil.rmtree(options.attach, ignore_errors=True)
    with bind(config) as listener:
        config = settle_split(resolve_model(config))
        with run_folder() as folder:
            return asyncio.run(serve(config, folder, EngineGroup(config, folder, engine), listener))


def bind(config: ServeConfig) -> socket.socket:
    """The socket to listen on. Raises ConfigError at once if the port is taken, before anything is started."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {config.host}: {error.strerror}; give a name or address of this machine") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        way_out = "stop what listens there or give another --port" if config.port else "give another --host"
        raise ConfigError(f"{config.host}:{config.port}: {os.strerror(error.errno or 0)}; {way_out}") from None
    return listener


def make_app(config: ServeConfig, client: EngineClient) -> Any:
    """The HTTP application. Raises ConfigError for what the tokenizer or the split would fail of."""
    from shardwise.server.app import create_app
    from shardwise.server.media import Media
    from shardwise.server.sampling import GenerationDefaults
    from shardwise.server.tokenizer import Tokenizer

    check_grammar_backend(config)
    model = check_split(config)
    defaults = GenerationDefaults.parse(generation_settings(config))
    vision = check_pictures(config)
    media = Media.load_processor(config, vision) if vision else None
    return create_app(config, client, Tokenizer.load(Path(config.model)), model, defaults, media)


async def serve(config: ServeConfig, folder: RunFolder, group: EngineGroup | None, listener: socket.socket) -> int:
    """Answer over HTTP until told to end. Without `group` the ranks are there already, and look for the socket."""
    client = EngineClient(folder.socket)
    try:
        await client.start()
        app = make_app(config, client)
        if group is not None:
            group.start()
        return await answer(config, client, group, app, listener)
    finally:
        if group is not None:
            await group.stop()
        await client.close()


async def answer(
    config: ServeConfig, client: EngineClient, group: EngineGroup | None, app: Any, listener: socket.socket
) -> int:
    """Run the HTTP server beside the watch over the ranks, and end both in order."""
    server, over = http_server(config, app), asyncio.Event()
    announcing = asyncio.create_task(announce(config, client, listener))
    watching = asyncio.create_task(supervise(group, client)) if group is not None else None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    told = asyncio.create_task(over.wait())
    await asyncio.wait({serving, told, *([watching] if watching else [])}, return_when=asyncio.FIRST_COMPLETED)
    for number in (signal.SIGTERM, signal.SIGINT):  # a second one ends at once
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
    lost = watching.exception() if watching is not None and watching.done() else None
    if watching is not None:
        watching.cancel()
    announcing.cancel()
    client.draining = True
    server.should_exit = True
    await serving
    if over.is_set():
        logger.info("draining")
        await client.drain(config.drain_seconds)
        if group is not None:
            await group.stop(wait_s=LEAVE_SECONDS)
    told.cancel()
    if isinstance(lost, EngineFailed):
        logger.error("%s", lost)
    elif lost is not None:
        raise lost
    return int(not over.is_set())


def http_server(config: ServeConfig, app: Any) -> Any:
    """A uvicorn server that leaves signals to us: it would raise them again after serving, and we end with 0."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            yield

    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, int(config.drain_seconds)),
    )
    return Server(settings)


async def announce(config: ServeConfig, client: EngineClient, listener: socket.socket) -> None:
    """Say where the server is, each time it becomes ready."""
    host, port = listener.getsockname()[:2]
    logger.info("starting %d rank(s) of %s", config.ranks, config.served_model_name[0])
    while True:
        try:
            ready = await client.wait_ready()
        except EngineFailed:
            return
        logger.info(
            "ready: http://%s:%d/v1 with %d tokens a request, %d in the KV cache, %d requests at once",
            host, port, ready.max_model_len, ready.kv_tokens, ready.max_num_seqs,
        )  # fmt: skip
        while (now := client.ready) is not None and now.restarts == ready.restarts:  # sizes may change meanwhile
            await asyncio.sleep(0.5)
        if not client.draining:
            logger.warning("the engine stopped; waiting for it to restart")


def run_in_group(config: ServeConfig, environment: RankEnvironment, engine: str) -> int:
    """Be a rank of a group that the user's torchrun started; the first rank sees to the API process too."""
    launcher_pid = os.getppid()
    die_with_parent(launcher_pid)
    set_up_process(config, environment.rank)
    try:
        if config.ranks not in (0, 1, environment.world):
            raise ConfigError(f"--tp {config.ranks}, and torchrun started {environment.world} ranks; leave --tp out")
        config = resolve_model(msgspec.structs.replace(config, ranks=environment.world))
        if not all(name.isdecimal() for name in config.gpu):
            raise ConfigError(f"--gpu {','.join(config.gpu)}: under torchrun, give indices of this host's GPUs")
        if config.gpu_spec or config.device_profile:  # the same facts on all ranks: they all choose the same
            split = settle_split(msgspec.structs.replace(config, gpu=()))
            config = msgspec.structs.replace(split, gpu=config.gpu)
        folder = group_folder(launcher_pid)
        if environment.rank == 0:
            if environment.shared_store:
                logger.warning("set %s=1 for torchrun: without it, a restart may not succeed", STORE_PER_GROUP)
            start_api_process(config, folder, launcher_pid)
        run_rank(folder, config, environment, engine)
        if environment.rank and environment.local_rank == 0:  # beside the first rank, the API process does it
            shutil.rmtree(folder.path, ignore_errors=True)
    except ConfigError as error:
        print(f"shardwise: error: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        logger.exception("stopped")
        return 1
    return 0


def group_folder(launcher_pid: int) -> RunFolder:
    """The folder that all ranks of one launcher find, also after a restart. Raises ConfigError if it is another's."""
    path = Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}-{launcher_pid}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid() or path.is_symlink():
        raise ConfigError(f"{path} belongs to somebody else; remove it or set another TMPDIR")
    return RunFolder(path)


def start_api_process(config: ServeConfig, folder: RunFolder, launcher_pid: int) -> None:
    """Start the API process, unless that of an earlier group is there still. It is in a session of its own, so that the
    launcher does not end it with this rank."""
    with open(folder.path / "api.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(folder.socket))
            return
        bind(config).close()
        folder.write_config(config)
        ours = ["--config-file", str(folder.config_file), "--attach", str(folder.path), "--launcher", str(launcher_pid)]
        api = subprocess.Popen(
            [sys.executable, "-m", "shardwise", "serve", *ours], stdin=subprocess.DEVNULL, start_new_session=True
        )
        watch(lambda: api.poll() is not None, lambda: leave(api.returncode) if api.returncode else None)
