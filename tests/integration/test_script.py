"""Scripts in the manner of known trainers, launched without a changed line under real torchrun."""

from __future__ import annotations

import signal
import textwrap

import pytest

from tests.support.scripts import alone, write_loop
from tests.support.waiting import until


def test_a_loop_that_is_stopped_goes_on_as_the_same_run_in_mlflow_too(start, launch, mlflow_run, leftovers, tmp_path):
    text = write_loop(tmp_path)
    running = start(tmp_path, "script.params.lr=0.05", "--", "train.py", "--lr", "{lr}", "--steps=10", "--wait", "4")
    (run_dir,) = until(lambda: list(tmp_path.glob("runs/*/*-train-*")))
    log = run_dir / "logs" / "rank-0.log"
    until(lambda: log.exists() and "step 4" in log.read_text(), said=lambda: running.process.poll())
    running.process.send_signal(signal.SIGTERM)
    stopped = running.finish()
    assert stopped.returncode == 143, stopped.report
    assert (stopped.status, leftovers(run_dir)) == ("KILLED", [])
    assert "step 4" in stopped.stdout
    result = launch(tmp_path, "resume", str(run_dir))
    assert result.returncode == 0, result.report
    assert result.status == "FINISHED"
    reference = alone(0.05, 10)
    client, run = mlflow_run(result)
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [one.step for one in history] == list(range(10))
    assert [one.value for one in history] == pytest.approx(reference, rel=1e-6)
    assert run.data.params.items() >= {("args.lr", "0.05"), ("args.steps", "10"), ("script.file", "train.py")}
    assert not any(name.startswith(("model.", "train.")) for name in run.data.params)
    assert run.data.metrics["summary/peak_memory_gib"] > 0.1
    # The script has made no second run.
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert (run_dir / "sources" / "train.py").read_text() == text


def test_a_script_that_fails_shows_its_own_traceback(launch, leftovers, tmp_path):
    (tmp_path / "my train.py").write_text(
        "import os\nassert os.environ['RANK'] == '0', 'not me'\nimport time\ntime.sleep(90)"
    )
    result = launch(tmp_path, "tracking=none", "--", "my train.py")
    assert result.returncode == 1, result.report
    assert "rank 1 on" in result.stderr
    assert "AssertionError: not me" in result.stderr
    assert "ortlaunch/" not in result.stderr.partition("the whole log")[0]
    assert (result.status, leftovers(result.run_dir)) == ("FAILED", [])


HYDRA = """
    import hydra

    @hydra.main(version_base=None, config_path=None, config_name=None)
    def main(config):
        print("lr is", config.lr)

    main()
"""
CASES = {
    "its own Hydra": (HYDRA, ("train.py", "+lr=3", "hydra.run.dir=."), 0, "lr is 3"),
    "a module": (
        "import sys\nprint(__name__, sys.argv[1:])",
        ("-m", "train", "a b", "--", "-x="),
        0,
        "['a b', '--', '-x=']",
    ),
    "os._exit": ("import os\nos._exit(int(os.environ['RANK']) * 7)", ("train.py",), 1, ""),
    "exits early": ("import sys\nsys.exit(0)", ("train.py",), 0, ""),
    "closes its streams": ("import os\nfor one in (0, 1, 2): os.close(one)\nos.chdir('/')", ("train.py",), 0, ""),
    "many bytes": ("print(('x' * 1023 + '\\n') * (4 << 10))", ("train.py",), 0, "bytes of output are in"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_scripts_of_other_kinds(launch, leftovers, tmp_path, case):
    code, words, exit_code, said = CASES[case]
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    result = launch(tmp_path, "tracking=none", "--", *words)
    assert result.returncode == exit_code, result.report
    assert said in result.stdout
    assert (result.status, leftovers(result.run_dir)) == ("FAILED" if exit_code else "FINISHED", [])


CHOOSER = """
    from pathlib import Path
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    class Chooser(Sweeper):
        def __init__(self, **_):
            pass

        def setup(self, **parts):
            self.launcher = Plugins.instance().instantiate_launcher(**parts)

        def sweep(self, arguments):
            for number, code in enumerate((7, 0)):
                words = [*arguments, f"script.params.code={code}"]
                returned = self.launcher.launch([words], initial_job_idx=number)[0].return_value
                with open("returned", "a") as file:
                    print(returned, file=file)
"""


@pytest.mark.nightly
def test_a_sweeper_of_a_package_gets_each_runs_objective(start, tmp_path):
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "chooser.py").write_text(textwrap.dedent(CHOOSER))
    (tmp_path / "train.py").write_text("import sys, mlflow\nmlflow.log_metric('val', 0.25)\nsys.exit(int(sys.argv[1]))")
    words = ("-m", "hydra.sweeper._target_=hydra_plugins.chooser.Chooser", "launcher.workers_per_node=1")
    path = ["env", f"PYTHONPATH={tmp_path}"]
    swept = start(tmp_path, *words, "tracking=none", "objective=val", "--", "train.py", "{code}", prefix=path).finish()
    assert (swept.returncode, (tmp_path / "returned").read_text().split()) == (1, ["None", "0.25"]), swept.report
    refused = start(tmp_path, *words, "launcher=slurm", "--", "train.py", "{code}", prefix=path).finish()
    assert (refused.returncode, refused.stderr.count("launcher=slurm: the sweeper waits")) == (2, 1), refused.report
