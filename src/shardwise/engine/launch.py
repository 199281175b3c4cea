"""Torch's elastic launcher as our child: `python -m shardwise.engine.launch FOLDER PARENT ENGINE LAUNCHER-OPTIONS`.

It differs from `python -m torch.distributed.run` in three ways: it dies with the process that started it, it logs to a
file (the group tells the user what matters, in one line), and it ends without a traceback.
"""

import logging
import os
import sys
from pathlib import Path

from shardwise.engine.folder import RunFolder
from shardwise.engine.processes import die_with_parent


def main(arguments: list[str]) -> int:
    """Run the launcher until its ranks end for good: 0 if they ended well."""
    folder, parent, engine, *rest = arguments
    die_with_parent(int(parent))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as launch

    logging.getLogger("torch.distributed").handlers[:] = [logging.FileHandler(RunFolder(Path(folder)).launcher_log)]
    worker = ["-m", "shardwise.engine.worker", folder, "--parent", str(os.getpid()), "--engine", engine]
    try:
        launch([*rest, *worker])
    except ChildFailedError:
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
