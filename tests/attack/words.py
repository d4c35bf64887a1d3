"""Words that no request may hold, beside those that the schema gives."""

from __future__ import annotations

OF_A_RUN = ("status", "logs", "cancel", "resume")
"""The verbs that take a run."""
LONG = "x" * 300
PLACES = ("file/x/y", "/proc/nowhere/x", f"new/{LONG}", "loop/x", "~nosuchuser/x")
"""Places where nothing can be written, also by root."""
TEXTS = {
    "--sweep": ("nosuch", LONG),
    "--experiment": ("nosuch",),
    "--root": ("nosuch", "file", LONG, "loop"),
    "--grep": ("[", "(?P<"),
    "--uri": ("bogus://x", "file:///x", "", "sqlite:///nowhere.db", "http://"),
    "--tag": ("x", "=x"),
    "--baseline": ("nosuch",),
    "--from-artifacts": ("nosuch", "file", "loop"),
}
"""Values of options that take any text, but cannot use these."""
MADE_OF = """\
data.name=text
model.name=gpt2
model.target=a:b
++backend.name=ort
trainer.name=single
model=gpt2
optimizer.name=sgd
+scheduler.name=cosine
launcher.name=slurm
tracking.name=mlflow
experiment=other
model.params.hidden_dim=3
++model.params.nowhere=3
run_root=other
~data
data={name:text}
train.steps
train.steps=1,2
profile.start=1
+profile=torch
+jobs=llama
""".splitlines()
"""Changes of what a run is made of, or that a run cannot take."""
FORMS = r"""
=5
=
KEY
KEY=[
KEY={
KEY='
 KEY =1
KEY.=1
KEY=${x
KEY=${nowhere}
--KEY
--KEY=1
-sc
-x
--
-
+
~
++
+=1
~=1
+KEY
KEY@x=1
KEY:x=1
.=1
..=1
KEY/x=1
/KEY=1
KEY=choice(
KEY=range(0)
KEY=glob(*
BYTES=1
KEY=1,2
KEY[0]=1
KEY..x=1
hydra.run.dir=/proc/nowhere
hydra.output_subdir=x
hydra.job.chdir=true
hydra/launcher=nosuch
~hydra
hydra.nosuch=1
+hydra.x=1
+after=
+after=,
+after=nosuch
after=x
++after=x
jobs=llama
--cfg
--cfg=nosuch
--info=nosuch
--resolve
-m=5
KEY=NESTED
""".strip("\n").splitlines()
"""Words that are no KEY=VALUE, or none of ours. KEY stands for a key, NESTED for many brackets, BYTES for no text."""


def form(text: str, key: str) -> str:
    """One of `FORMS` as a word."""
    return text.replace("KEY", key).replace("NESTED", "[" * 2000).replace("BYTES", "\udcff")
