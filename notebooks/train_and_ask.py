# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train on two ranks, look at the run, ask the model
#
# The ranks are separate processes: the notebook starts them with `horovodrun` and reads their output files. The sample
# trains in about 2 minutes on 2 cores.

# %%
import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from hvd_bert import Callback, QuestionAnswerer, train

# %% tags=["parameters"]
run = Path("../runs/notebook")
flags = ["--config", "sample"]
more_steps = 20

# %% [markdown]
# ## Train
#
# `horovodrun` is next to this notebook's Python. Two ranks on a CPU get one thread each.

# %%
horovodrun = Path(sys.executable).with_name("horovodrun")
command = [sys.executable, "-m", "hvd_bert.train", *flags, "--output_dir", run, "--overwrite_output_dir"]
environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
subprocess.run([horovodrun, "--gloo", "-np", "2", "-H", "localhost:2", *command], env=environ, check=True)

# %% [markdown]
# ## Look at the run
#
# `metrics.jsonl` has a line per logged step and per evaluation.

# %%
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if "loss" in line]
scores = json.loads((run / "eval_results.json").read_text())

plt.plot([line["step"] for line in steps], [line["loss"] for line in steps])
plt.xlabel("step")
plt.ylabel("loss")
plt.title(f"EM {scores['exact_match']:.1f}, F1 {scores['f1']:.1f} on {scores['total']} questions")
plt.show()

# %% [markdown]
# ## Ask the model

# %%
samples = json.loads((run / "eval_samples.json").read_text())
qa = QuestionAnswerer(run)
for sample in samples[:3]:
    answer = qa(question=sample["question"], context=sample["context"])
    print(f"{sample['question']}\n  {answer.text!r} ({answer.score:.2f}), expected {sample['answers']}")

# %% [markdown]
# ## Train in the notebook
#
# A single rank trains in the notebook's process. A callback gets the values during the run.


# %%
class Losses(Callback):
    def on_log(self, step, metrics):
        print(f"step {step}: loss {metrics['loss']:.2f}")


settings = {"config": "sample", "max_steps": more_steps, "max_eval_samples": 50, "overwrite_output_dir": True}
result = train(**settings, output_dir=run.with_name("in-notebook"), callbacks=[Losses()])
print(result.scores)
