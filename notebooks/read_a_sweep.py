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
# # Draw the speed-up of a sweep
#
# `hvd-bert bench sweep` trains with several strategies and numbers of ranks, and `hvd-bert report`
# compares the runs. Its `report.csv` has a row per strategy and number of ranks.

# %%
import csv
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt

# %% tags=["parameters"]
sweep = Path("../runs/sweep")
report = Path("../runs/sweep_report")

# %%
subprocess.run([sys.executable, "-m", "hvd_bert.tools.report", sweep, "--out", report], check=True)

# %% [markdown]
# A row without a speed-up gives the reason: the runs did different work, or their losses do not agree.

# %%
table = report / "report.csv"  # missing if no two runs did the same work
curves, ideal = defaultdict(list), {}
with table.open(encoding="utf-8", newline="") if table.exists() else nullcontext(()) as file:
    for row in csv.DictReader(file):
        if row["speedup"]:
            devices, speedup = int(row["devices"]), float(row["speedup"])
            curves[row["strategy"], row["scaling"]].append((devices, speedup))
            ideal[devices] = speedup / float(row["efficiency"])
        else:
            print(f"{row['strategy']} on {row['devices']}: {row['reason']}")

for (strategy, scaling), points in curves.items():
    plt.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{strategy}, {scaling} scaling")
if curves:
    plt.plot(*zip(*sorted(ideal.items()), strict=True), color="grey", linestyle=":", label="ideal")
    plt.xlabel("devices")
    plt.ylabel("speed-up")
    plt.legend()
    plt.show()
else:
    print(f"There is no speed-up. {report / 'report.html'} has the reasons.")
