"""The tracing process of ``ortlaunch estimate``: ``python -m ortlaunch.estimate.process FOLDER``.

It reads ``config.yaml`` and ``request.json`` in the folder. It writes ``report.json``, or ``refused.txt`` if the
request is wrong.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path

import psutil
import torch

from ortlaunch.base.errors import RequestError
from ortlaunch.base.modules import add_working_folder
from ortlaunch.base.processes import die_with_parent
from ortlaunch.config.backends import why_no_ort
from ortlaunch.config.candidates import possible
from ortlaunch.config.load import load_config
from ortlaunch.config.trainers import trainer_of
from ortlaunch.estimate.request import Request
from ortlaunch.launch.report_process import REFUSED, REPORT


def main() -> None:
    """Estimates the run whose configuration is in the folder."""
    die_with_parent()
    # All that is traced lies on the CPU, also where there is a GPU, which DeepSpeed would choose by itself.
    os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="")
    folder = Path(sys.argv[1])
    add_working_folder()
    try:
        config, request = load_config(folder / "config.yaml"), Request.read(folder)
        torch.set_num_threads(1)
        # As a worker does it: what DeepSpeed would import beside is not in its memory.
        trainer_of(config.trainer).import_packages()
        if any(one.backend.name == "ort" for one in possible(config)) and why_no_ort("") is None:
            from ortlaunch.ort import session

            # A worker has it in memory, too.
            session.import_ortmodule()

        from ortlaunch.estimate.study import Study

        # A collection need not look at what was imported, which stays.
        gc.collect()
        gc.freeze()
        report = Study(config, request).report()
    except RequestError as error:
        (folder / REFUSED).write_text(str(error))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    else:
        own = psutil.Process().memory_info()
        report["own_bytes"] = own.rss
        (folder / REPORT).write_text(json.dumps(report, indent=2))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
