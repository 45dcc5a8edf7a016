"""Ops of partc's own: no runtime runs them whole, so their shards are put together in tests of their own."""

from __future__ import annotations

from rule_case import Case

CASES: list[Case] = []
UNPROVEN = {
    "partc.nn.Dropout": "test_training_dropout.py compares the masks of its shards with that of the whole",
    "partc.nn.ExpertMatMul": "test_experts.py compares each cut of it with the products that it replaces",
    "partc.nn.ExpertMatMulNBits": "test_experts.py compares it with the float model whose weights its blocks hold exactly",
    "partc.nn.FromExperts": "test_routes.py compares layers between the borders with those of one rank",
    "partc.nn.RingAttention": "test_context.py compares rings of two to six ranks with the attention of one",
    "partc.nn.ShardedCacheAttention": "test_sharded_caches.py compares the tokens of two to four ranks with the unsharded model's",
    "partc.nn.ToExperts": "test_routes.py compares layers between the borders with those of one rank",
    "partc.nn.Extreme": "test_training_extremes.py trains with what is cut along it",
}
