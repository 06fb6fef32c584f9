"""Bytes that a rank receives when weights change their layout: closed forms, exact fractions, no planner.  Torch-free.

M is the bytes of the weights; `t`, `p` are tensor and pipeline sizes in training, `t_g`, `p_g` in generation; N is the
number of FSDP shards.  Everything follows from one line: a rank receives what it needs less what it already has.
HybridFlow: Sheng et al. 2024, arXiv:2409.19256, table 2.  ReaL: Mei et al. 2024, arXiv:2406.14088.
"""

from __future__ import annotations

from fractions import Fraction

from tutelage.errors import ConfigError


def received(m: int, needed: Fraction, kept: Fraction) -> Fraction:
    """(needed - kept) M: shares of M that a rank needs, and that it has of what it needs."""
    return (needed - kept) * m


def grouped(m: int, t: int, p: int, t_g: int, p_g: int) -> Fraction:
    """HybridFlow's strided groups: M / (t_g p_g) - M / (t p) = (t p - t_g p_g) / (t_g p_g t p) M for each rank.

    The paper's `tp` is the product t p, all model-parallel ranks; read as the tensor size alone it is right for p = 1
    only.  M is cut evenly by t and by the stages; where stages differ in size, this is the mean over the ranks.

    Raises ConfigError unless t_g divides t and p_g divides p: a training shard then does not lie in a generation shard.
    """
    if t % t_g or p % p_g:
        raise ConfigError(
            f"generation ({t_g} tensor, {p_g} pipeline) does not divide training ({t} tensor, {p} pipeline)",
            fix="use `either_way`, or sizes that divide",
        )
    return received(m, Fraction(1, t_g * p_g), Fraction(1, t * p))


def either_way(m: int, t: int, p: int, t_g: int, p_g: int) -> Fraction:
    """M / (t_g p_g) - M / (max(t, t_g) max(p, p_g)): on each axis the finer shard lies inside the coarser one.

    The mean over the ranks where stages differ in size.  `grouped` where generation is the coarser one on both axes.
    """
    for generation, training in ((t_g, t), (p_g, p)):
        if generation % training and training % generation:
            raise ConfigError(
                f"{generation} neither divides {training} nor is divided by it", fix="choose another size"
            )
    return received(m, Fraction(1, t_g * p_g), Fraction(1, max(t, t_g) * max(p, p_g)))


def gathered_whole(m: int, t: int, p: int) -> Fraction:
    """(t p - 1) / (t p) M: every rank gathers the whole model and drops what it does not need.

    HybridFlow-V in the paper's table 2.  DeepSpeed-Chat is the same with (t p d), since it shards over data ranks too.
    """
    return received(m, Fraction(1), Fraction(1, t * p))


def nested(m: int, n: int, t_g: int) -> Fraction:
    """(1 / t_g - 1 / N) M: N-way FSDP whose shard lies inside the generation shard.

    That is so where FSDP and tensor parallel cut the same dimension, t_g divides N and groups are strided.  HSDP: N is
    the shard size alone.  A weight that generation does not cut: t_g = 1.

    Raises ConfigError where t_g does not divide N.
    """
    if n % t_g:
        raise ConfigError(f"{t_g} generation slices do not divide {n} shards", fix="a shard then crosses two slices")
    return received(m, Fraction(1, t_g), Fraction(1, n))


def crossing(m: int, n: int, t_g: int) -> Fraction:
    """M / t_g - M / (N t_g) = (N - 1) / (N t_g) M: FSDP cuts another dimension than tensor parallel.

    As where FSDP cuts rows (its default) and a row-parallel matrix (o_proj, down_proj) is cut by columns.  It costs
    M (1 - 1 / t_g) / N more than `nested`.
    """
    return received(m, Fraction(1, t_g), Fraction(1, n * t_g))


def elsewhere(m: int, t_g: int, p_g: int = 1) -> Fraction:
    """M / (t_g p_g): a rank of an engine in another process, or of another mesh, has nothing yet."""
    return received(m, Fraction(1, t_g * p_g), Fraction(0))


def uneven_rows(n: int, t_g: int) -> int:
    """Rows by which a weight's received rows can differ from `nested` where N or t_g does not divide its rows D.

    (t_g - 1) + (N - 1).  torch.chunk makes chunks of ceil(D / N) rows: every boundary moves right by less than N rows,
    the last stays.  So an overlap, the smaller end less the larger start, changes by at most N - 1 rows (t_g <= N),
    and a chunk of t_g has at most t_g - 1 rows more or fewer than D / t_g.
    """
    return (t_g - 1) + (n - 1)
