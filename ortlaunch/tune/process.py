"""The process of one trial: ``python -m ortlaunch.tune.process FOLDER``.

It reads ``config.yaml`` and ``request.json`` in the folder and launches that run as `ortlaunch run` does. It writes the
run folder's path to ``run``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from ortlaunch.base import exit_codes
from ortlaunch.base.errors import RequestError
from ortlaunch.base.files import replace_text
from ortlaunch.config.load import load_config
from ortlaunch.launch.planning import make_plan
from ortlaunch.launch.table import launcher_of
from ortlaunch.run import failure
from ortlaunch.run.sweep import SweepTask
from ortlaunch.tracking import trackers

CONFIG, REQUEST, RUN, REFUSED = "config.yaml", "request.json", "run", "refused.txt"
"""Files of a trial's folder: what is asked for, the run folder's path, and why the run was refused."""


def main() -> None:
    """Launches the run of the folder and exits with its code."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text())
    try:
        config = trackers.with_credentials(load_config(folder / CONFIG), os.environ)
        plan = dataclasses.replace(make_plan(config), sweep=SweepTask(Path(request["sweep"]), int(request["number"])))
        # The search looks at it several times a second.
        replace_text(folder / RUN, str(plan.run_dir))
        code = launcher_of(config).submit(plan, config, request["overrides"])
        if code == exit_codes.REQUEST and (failed := failure.first(plan.run_dir)) is not None:
            # A worker has refused it, such as a model that cannot checkpoint its activations.
            replace_text(folder / REFUSED, failed.message)
    except RequestError as error:
        replace_text(folder / REFUSED, str(error))
        code = exit_codes.REQUEST
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main()
