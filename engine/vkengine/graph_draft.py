"""The part of a round that drafts: MTP over the committed rows, then one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor

from .lanes import WIDTH
from .models.layout import AttentionWeights, HeadWeights, MoeWeights
from .ops.attention import triton as attention_ops
from .ops.embed.triton import mtp_input_kernel
from .ops.mlp import triton as mlp_ops
from .ops.moe import triton as moe_ops
from .ops.triton_config import hand_over_mode
from .ops.triton_launch import Stream, gemv, tensor
from .rows import Rows

if TYPE_CHECKING:
    from .graph import Round


def draft(one: Round, trunk: Stream, m: int) -> None:
    """MTP over the committed rows, then k tokens into ``tokens[:, 1:]``."""
    w, lanes = one.weights, one.lanes
    mtp = w.mtp
    assert mtp is not None
    head = draft_head(w.head, mtp.norm, one.head_rows)
    # Every committed row enters the cache; one row a sequence goes on to the first draft.
    stream = mtp_step(one, trunk.h, lanes.record, w.head.norm, m, one.rows(lanes.pos, m), "ingest")
    logits = one.project("draft", stream, head)
    one.sample(logits, head, None, lanes.tokens[:, 1:], 1, lanes.next_pos, 1)
    for i in range(1, one.k):
        at = one.rows(lanes.chain_pos[i], 1)
        stream = mtp_step(one, stream.h, lanes.tokens[:, i:], mtp.norm, 1, at, "chain")
        out = lanes.tokens[:, i + 1 :]
        logits = one.project("draft", stream, head)
        one.sample(logits, head, None, out, 1, lanes.next_pos, i + 1)


def mtp_step(
    one: Round,
    h: Tensor,
    tokens: Tensor,
    final: Tensor,
    m: int,
    rows: Rows,
    name: str,
    cache_only: bool = False,
) -> Stream:
    """The MTP layer over rows of ``h``; returns the stream of one row a sequence."""
    w = one.weights
    c, mtp = w.config, w.mtp
    assert mtp is not None
    count = one.batch * m
    dtype = w.embed.dtype
    pdl = hand_over_mode(w.embed.device, early=True)
    x = one.ws.get("mtp.x", (count, 2 * c.hidden_size), dtype)
    mtp_input_kernel[(count,)](
        tokens,
        w.embed,
        h,
        one.lanes.row,
        one.gain(final),
        one.gain(mtp.norm_embedding),
        one.gain(mtp.norm_hidden),
        x,
        WIDTH,
        c.vocab_size,
        c.rms_eps,
        M=m,
        H=c.hidden_size,
        HP=triton.next_power_of_2(c.hidden_size),
        HAS_ROW=False,
        PDL=pdl,
        launch_pdl=pdl > 0,
    )
    stream = one.stream(name, count)
    fc = tensor(mtp.fc)
    mixer, ffn, cache = mtp.layer.mixer, mtp.layer.ffn, one.state.mtp
    gemv(fc, x, None, stream=stream, add=False, gain=one.gain(mixer.norm))
    assert isinstance(mixer, AttentionWeights) and cache is not None
    gain = one.gain(ffn.norm)
    if cache_only:
        attention_ops.run(stream, mixer, cache, rows, one.ws, gain)
        return stream
    last = stream if m == 1 else one.stream("chain", one.batch)
    if m == 1:
        attention_ops.run(stream, mixer, cache, rows, one.ws, gain)
    else:
        only = one.lanes.row
        attention_ops.run(stream, mixer, cache, rows, one.ws, gain, row=only, into=last)
    if isinstance(ffn, MoeWeights):
        moe_ops.run(last, ffn, one.ws, one.gain(mtp.norm))
    else:
        mlp_ops.run(last, ffn, one.ws, one.gain(mtp.norm))
    return last


def draft_head(head: HeadWeights, norm: Tensor, rows: int | None) -> HeadWeights:
    """The head under the MTP layer's norm, cut to the first ``rows`` ids when it has no map."""
    weight = tensor(head.weight)
    if rows is not None and rows < weight.shape[0] and head.ids is None:
        weight = weight[:rows]
    return HeadWeights(head.config, norm, weight, head.ids)
