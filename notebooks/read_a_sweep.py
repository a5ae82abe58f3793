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
# `python -m hvd_bert.bench sweep` trains with several strategies and numbers of ranks, and `python -m hvd_bert.report`
# compares the runs. Its `report.csv` has a row per strategy and number of ranks.

# %%
import csv
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

# %% tags=["parameters"]
sweep = Path("../runs/sweep")
report = Path("../runs/sweep_report")

# %%
subprocess.run([sys.executable, "-m", "hvd_bert.report", sweep, "--out", report], check=True)

# %% [markdown]
# A row without a speed-up gives the reason: the runs did different work, or their losses do not agree.

# %%
curves = defaultdict(list)
with (report / "report.csv").open(encoding="utf-8", newline="") as file:
    for row in csv.DictReader(file):
        if row["speedup"]:
            curves[row["strategy"], row["scaling"]].append((int(row["devices"]), float(row["speedup"])))
        else:
            print(f"{row['strategy']} on {row['devices']}: {row['reason']}")

for (strategy, scaling), points in curves.items():
    plt.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{strategy}, {scaling} scaling")
most = max(devices for points in curves.values() for devices, _ in points)
plt.plot([1, most], [1, most], color="grey", linestyle=":", label="ideal")
plt.xlabel("devices")
plt.ylabel("speed-up")
plt.legend()
plt.show()
