"""Continuous batching: rows begin when there is room for them and leave when they end, step by step.

Shapes: B requests, b rows still decoding, a rows that begin, P prompts prefilled together, N their packed tokens,
T response tokens, V vocabulary.

A step prefills and begins what is due (`admission.Queue`), or decodes one token of every running row.  Rows that have
ended are not computed again, and nothing is moved for that: their pages are free at once.  No pass, draw or test
for an end runs row by row.  In Python are rows that begin, end, or may have met a stop string, and the table of pages,
which is laid out anew, for all rows, in a step in which one of them takes a page.
What comes back from the device is one small tensor, or two where a stop string may have been met.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tutelage.errors import RolloutError
from tutelage.models.next_token import next_token_logits
from tutelage.models.packed_products import PackedLayers
from tutelage.models.thin_products import ThinLayers
from tutelage.native import ops
from tutelage.rollout.inprocess.admission import Admission, Queue, Request
from tutelage.rollout.inprocess.cache import PagedCache
from tutelage.rollout.inprocess.pages import PageTable, Prefix
from tutelage.rollout.inprocess.stopping import Stopping
from tutelage.rollout.sampling import SamplingParams, sample_tokens

PAGE = 32
"""Positions of a page, unless the bound is too small for the longest row in such pages."""


@dataclass(frozen=True)
class Bounds:
    """What one batch may hold at a time.

    tokens   cached positions, those of unfilled pages included.
    slots    rows that decode together.
    prefill  prompt tokens of one packed pass; a longer prompt has a pass of its own.
    """

    tokens: int = 65536
    slots: int = 256
    prefill: int = 8192


@dataclass(frozen=True)
class CacheUse:
    """The cache of a batch: its bound, `pages` of `page` positions, the `bytes` they take, and how many were in use.

    peak   the most pages in use at once.  bytes  of all layers, 0 before the first forward pass.
    """

    pages: int
    page: int
    bytes: int
    peak: int

    @property
    def tokens(self) -> int:
        return self.pages * self.page


@dataclass(frozen=True, eq=False)
class Running:
    """Device columns of the rows that decode, in the order of the page table.

    request  (b,) number;  key  (b,);  token  (b,) the newest, not yet in the cache;  done  (b,) response tokens so far.
    prompt_len  (b,) positions of the shared part;  own_len  (b,) positions written since.
    """

    request: Tensor
    key: Tensor
    token: Tensor
    done: Tensor
    prompt_len: Tensor
    own_len: Tensor

    def columns(self) -> tuple[Tensor, ...]:
        return self.request, self.key, self.token, self.done, self.prompt_len, self.own_len

    def select(self, index_b: Tensor) -> Running:
        return Running(*(column[index_b] for column in self.columns()))

    def joined(self, other: Running) -> Running:
        return Running(*(torch.cat(pair) for pair in zip(self.columns(), other.columns(), strict=True)))


class ContinuousBatch:
    """Generates requests with a model whose attention implementation takes `cu_seq_lens_q` and `paged_step`.

    tokens (B, T), logp (B, T)  on the device, valid up to lens (B,);  lens, finished (B,)  on the host.
    sampled   tokens sampled so far.
    """

    def __init__(
        self,
        model: nn.Module,
        requests: Sequence[Request],
        params: SamplingParams,
        stopping: Stopping,
        device: torch.device,
        bounds: Bounds,
        prior: Sequence[Sequence[int]] = (),
    ) -> None:
        """prior: for each request, the response so far; its last tokens may begin a stop string.

        Raises RolloutError for a request that alone has no room within the bound.
        """
        self.model = model
        self.requests = requests
        self.params = params
        self.stopping = stopping
        self.device = device
        self._thin = ThinLayers(model, besides=_output_head(model))
        self._packed = PackedLayers(model, params.max_new_tokens)
        self.queue = Queue(requests, params.max_new_tokens, bounds.slots, bounds.prefill)
        page = _page_that_fits(self.queue, bounds.tokens)
        pages = min(bounds.tokens // page, self.queue.pages_needed(page))
        if requests and self.queue.largest(page) > pages:
            raise RolloutError(
                f"one response and what is before it need {self.queue.largest(page)} cached tokens, the bound is "
                f"{bounds.tokens}",
                fix="raise rollout.tokens_in_flight",
            )
        self.table = PageTable(pages, page)
        self.cache = PagedCache(pages, page)
        count, most = len(requests), params.max_new_tokens
        tokens_BT = torch.zeros((count, most), dtype=torch.int64)
        for row, response in enumerate(prior):
            tokens_BT[row, : len(response)] = torch.tensor(response, dtype=torch.int64)
        self.tokens = tokens_BT.to(device)
        self.logp = torch.zeros((count, most), dtype=torch.float32, device=device)
        self.lens = torch.tensor([request.done for request in requests], dtype=torch.int64)
        self.finished = torch.zeros(count, dtype=torch.bool)
        self.sampled = 0
        self._rows = Running(*(torch.empty(0, dtype=torch.int64, device=device) for _ in range(6)))
        self._numbers = torch.empty(0, dtype=torch.int64)

    @property
    def busy(self) -> bool:
        """Whether a row runs or waits."""
        return bool(self.queue) or len(self.table) > 0

    @property
    def use(self) -> CacheUse:
        return CacheUse(self.table.pages, self.table.page, self.cache.bytes, self.table.peak)

    def step(self) -> list[int]:
        """Sample one token of some rows; the requests that ended with it.

        Raises RolloutError, naming the prompt, when the model's logits are not finite.
        """
        admissions = self.queue.due(self.table)
        return self._begin(admissions) if admissions else self._decode()

    # ---- rows that begin ----

    def _begin(self, admissions: Sequence[Admission]) -> list[int]:
        groups = [a.group for a in admissions]
        new = [g for g in groups if g.prefix is None]
        if new:
            for group in new:
                group.prefix = self.table.prefix(len(group.tokens))
            logits_PV = self._prefill([g.tokens for g in new], [g.prefix for g in new if g.prefix is not None])
            for group, logits_V in zip(new, logits_PV, strict=True):
                group.logits = logits_V
        logits = [g.logits for g in groups if g.logits is not None]
        whole_PV = logits_PV if len(new) == len(groups) else torch.stack(logits)
        begun = self.queue.begin(admissions)
        prefixes = [g.prefix for g in groups if g.prefix is not None]
        for group, prefix in zip(groups, prefixes, strict=True):
            prefix.held = bool(group.rows)
            group.logits = group.logits.clone() if group.rows and group.logits is not None else None

        requests = [self.requests[number] for numbers in begun for number in numbers]
        number_a = torch.tensor(list(itertools.chain.from_iterable(begun)))
        source_a = torch.repeat_interleave(torch.arange(len(begun)), torch.tensor([len(rows) for rows in begun]))
        columns = [
            number_a.tolist(),
            [request.key for request in requests],
            [0] * len(requests),
            [request.done for request in requests],
            [len(request.tokens) for request in requests],
            [0] * len(requests),
        ]
        rows = Running(*torch.tensor(columns, dtype=torch.int64).to(self.device))
        behind = [prefixes[source] for source in source_a.tolist()]
        self.table.add(behind, [self.queue.own_positions(number) for number in number_a.tolist()])
        return self._sample(whole_PV, rows, number_a, source_a, before=self._rows)

    def _prefill(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[Prefix]) -> Tensor:
        """(P, V) logits after the last token of each prompt; its keys and values go to its pages, once."""
        page = self.table.page
        lens_P = torch.tensor([len(p) for p in prompts])
        starts = torch.cat([lens_P.new_zeros(1), lens_P.cumsum(0)])
        position_N = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1], lens_P)
        pages = torch.tensor([x for prefix in prefixes for x in prefix.pages])
        counts_P = torch.tensor([len(prefix.pages) for prefix in prefixes])
        first_P = counts_P.cumsum(0) - counts_P
        page_N = pages[torch.repeat_interleave(first_P, lens_P) + position_N // page]
        partial = pages[first_P + counts_P - 1][lens_P % page != 0].to(self.device)
        tokens_N = torch.tensor([t for p in prompts for t in p], dtype=torch.int64)
        packed = torch.stack([tokens_N, position_N, page_N, position_N % page]).to(self.device)
        self.cache.begin_prefill(packed[2], packed[3], partial)
        logits_1PV = next_token_logits(
            self.model,
            (starts[1:] - 1).to(self.device),
            input_ids=packed[:1],
            position_ids=packed[1:2],
            past_key_values=self.cache,
            use_cache=True,
            cu_seq_lens_q=starts.to(self.device, torch.int32),
        )
        return logits_1PV[0]

    # ---- rows that run ----

    def _decode(self) -> list[int]:
        rows, table = self._rows, self.table
        fresh = torch.tensor(table.extend(), dtype=torch.int64).to(self.device)
        step = table.layout(self.device).at(rows.prompt_len, rows.own_len, table.page, table.longest)
        self.cache.begin_decode(step, fresh)
        with self._thin.in_blocks(), self._packed.in_order(), ops.in_decoding():
            logits_b1V = next_token_logits(
                self.model,
                1,
                input_ids=rows.token[:, None],
                position_ids=(rows.prompt_len + rows.own_len)[:, None],
                past_key_values=self.cache,
                use_cache=True,
                paged_step=step,
            )
        table.advance()
        grown = Running(rows.request, rows.key, rows.token, rows.done, rows.prompt_len, rows.own_len + 1)
        return self._sample(logits_b1V[:, 0], grown, self._numbers, None, before=None)

    def _sample(
        self, logits: Tensor, rows: Running, number_b: Tensor, source_b: Tensor | None, before: Running | None
    ) -> list[int]:
        """One token for each of `rows`, which are the last ones of the page table; those behind `before` are new."""
        token_b, logp_b = sample_tokens(logits, rows.key, rows.done, self.params, source_b)
        self.sampled += token_b.shape[0]
        self.tokens[rows.request, rows.done] = token_b
        self.logp[rows.request, rows.done] = logp_b.float()
        stopped_b = self._stopped(rows, token_b, logp_b, number_b)
        self.lens[number_b] += 1
        self.finished[number_b] = stopped_b
        over_b = stopped_b | (self.lens[number_b] == self.params.max_new_tokens)
        rows = Running(rows.request, rows.key, token_b, rows.done + 1, rows.prompt_len, rows.own_len)
        first = 0 if before is None else before.request.shape[0]
        if bool(over_b.any()):
            keep = (~over_b).nonzero().squeeze(1)
            self.table.keep([*range(first), *(keep + first).tolist()])
            rows, kept_numbers = rows.select(keep.to(self.device)), number_b[keep]
        else:
            kept_numbers = number_b
        self._rows = rows if before is None else before.joined(rows)
        self._numbers = kept_numbers if before is None else torch.cat([self._numbers, kept_numbers])
        return number_b[over_b].tolist()

    def _stopped(self, rows: Running, token_b: Tensor, logp_b: Tensor, number_b: Tensor) -> Tensor:
        """(b,) bool on the host: rows that the newest token ends before their length limit."""
        flags = [self.stopping.by_token(token_b), ~logp_b.isfinite()]
        if self.stopping.has_strings:
            flags.append(self.stopping.may_complete(token_b) & ~flags[0])
        stopped_b, broken_b, *candidates = torch.stack(flags).cpu()
        if bool(broken_b.any()):
            self._refuse(int(number_b[broken_b][0]))
        if candidates and bool(candidates[0].any()):
            index = candidates[0].nonzero().squeeze(1)
            stopped_b[index] = torch.tensor(self.stopping.holds_string(self._tails(number_b[index])))
        return stopped_b

    def _tails(self, number_c: Tensor) -> list[list[int]]:
        """The last tokens of these responses, the newest included."""
        ends = self.lens[number_c] + 1
        window = torch.arange(-self.stopping.tail, 0) + ends[:, None]
        tokens = self.tokens[number_c.to(self.device)[:, None], window.clamp(min=0).to(self.device)].tolist()
        starts = (-window[:, 0]).clamp(min=0).tolist()
        return [row[start:] for row, start in zip(tokens, starts, strict=True)]

    def _refuse(self, number: int) -> None:
        raise RolloutError(
            f"the logits for prompt {self.requests[number].name!r} are not finite at response token "
            f"{int(self.lens[number])}",
            fix="the weights hold NaN or infinity, or overflow in this dtype: look at the last updates, or use float32",
        )


def _output_head(model: nn.Module) -> nn.Module | None:
    """`next_token_logits` multiplies with it itself."""
    return model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None


def _page_that_fits(queue: Queue, tokens: int) -> int:
    """The largest power of two up to PAGE with which every row alone has room within `tokens` positions.

    With pages of one position everything that the engine accepts has room.
    """
    page = PAGE
    while page > 1 and queue.largest(page) > tokens // page:
        page //= 2
    return page
