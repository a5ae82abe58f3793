"""Products of many small matrices: numpy's BLAS and torch's give the same result, and when which is used."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tables import each

from hvd_bert.model.cpu import linear


@pytest.fixture(params=[True, False], ids=["numpy", "torch"])
def calls(request, monkeypatch):
    """Each library in turn; records numpy's products."""
    products = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *given, **named: products.append(1) or matmul(*given, **named))
    monkeypatch.setattr(linear, "numpy_is_faster", lambda: request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    yield products
    assert bool(products) is request.param


def test_strided_matrices_of_each_kind(calls):
    torch.manual_seed(0)
    rows, columns, square = torch.randn(7, 3, 4), torch.randn(9, 3, 4), torch.randn(3, 7, 9)  # tokens, heads, head size
    q, k = rows.transpose(0, 1), columns.transpose(0, 1)
    for left, right in ((q, k.transpose(1, 2)), (square, k), (square.transpose(1, 2), q)):
        exact = left.double() @ right.double()
        for out in (torch.empty(exact.shape), torch.empty(exact.transpose(0, 1).shape).transpose(0, 1)):
            assert linear.batched_product(left, right, out) is out
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@each(
    ("environ", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, "1"),
        ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}, "2"),
        ({"OMP_NUM_THREADS": "3,2"}, "3"),
        ({"OMP_NUM_THREADS": "none"}, "cores"),
        ({}, "cores"),
    ],
)
def test_threads_as_openblas_reads_them(environ, expected, monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert str(linear.openblas_threads()) == expected.replace("cores", "5")


def test_installed_numpy_reports_its_blas():
    program = "from hvd_bert.model.cpu import linear; linear.numpy_is_faster(); print(linear.openblas_threads())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 0
