"""`python -m tests.support.fake_cuda REQUESTS`, under the guard; prints the results as JSON.

`REQUESTS` is a JSON list: the fields of a case to train, or `{"large": arguments of measure}`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from tests.support.fake_cuda.large import measure
from tests.support.fake_cuda.training import train
from tests.support.races.cases import Case


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if "large" in request:
        return measure(**request["large"])
    return asdict(train(Case(**request)))


torch.set_num_threads(1)
print(json.dumps([_answer(request) for request in json.loads(sys.argv[1])]))
