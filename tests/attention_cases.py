"""Pieces of eager attention that the matching tests put together."""

import torch

from tests.graph_cases import causal, repeat_kv

FRONT_ENDS = ("dynamo", "export")
MINIMUM = torch.finfo(torch.float32).min


def own_mask(q):
    return causal(q.shape[2], q.shape[2])


def additive(q):
    return torch.zeros(q.shape[2], q.shape[2]).masked_fill(~own_mask(q), MINIMUM)


def product(q, k):
    return q @ repeat_kv(k, 2).transpose(-1, -2)
