"""Read a stream with `resume`, note each batch that runs, and print the outputs."""

import json
import os
import sys

import torch

from parawrap import parallel

folder, count = sys.argv[1], int(sys.argv[3])
log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def double(x, name):
    os.write(log, b"%d\n" % x[0].item())
    return x * 2


seen = []
with torch.no_grad(), parallel(double, ["cpu", "cpu"]) as p:
    source = ({"name": f"row {i}", "x": torch.full((2, 1), float(i))} for i in range(count))
    for output in p.map(source, resume=folder):
        seen.append(output[0].item())
print(json.dumps(seen))
