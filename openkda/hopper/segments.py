"""Exact parallelism over the sequence: the segment table, which entry states are known, and the chain of the others.

A sequence is cut into segments of nearly equal numbers of 32-token steps, by lengths alone. `segment table [NS, 8] int32`, one row each:

    sequence (-1: unused row), first row, end row, sequence's first row, its end row, its first segment, its segment count, a ticket

`known [HV, NS] int32` says, per head and segment, whether `entry [NS, HV, V, K]` already holds the segment's entry state; for the first
segment of a sequence, whose entry state always is, the first row that `segments_all` does not serve. The tail pass
runs the state over the last steps before each segment from (0, I) and so gets (M, b): the true entry state is E M + b for the unknown state
E before the tail. |E M| is at most max |E| times the sum, over the rows of M, of each one's largest |M|, row by row of E. Where that sum is
at most DROPPED in either half of the rows, that is 2^-33 of max |E|, below half an ulp of what fp32 keeps of a state of E's size, or of
1/256 of it: b is the entry state. The measured M needs no assumption on gates, keys or beta, and depends on earlier tokens only.
Where M is not that small, `summary` gives (M, b) of whole segments and `combine_kernel` chains them: entry[s + 1] = entry[s] M_s + b_s."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from openkda.hopper.cluster import meet
from openkda.hopper.compat import gdc_launch_dependents, gdc_wait, gl, gluon, mbarrier
from openkda.hopper.tiles import Work, computed_here, group_count, late, plain_shared
from openkda.tables import bound_at, larger

DROPPED = tl.constexpr(2.0**-34)  # a tail drops what lies before it where the largest |M| of the rows of M's halves sum to no more
COLUMNS = tl.constexpr(8)  # of the segment table


@triton.jit
def lane_at(first, steps, part):
    """The first row of a lane that begins at a part, of 1024, of a sequence: whole groups of 64 tokens come before it"""
    return first + 64 * ((steps + 1) // 2 * part // 1024)


@triton.jit(do_not_specialize=["N", "T", "target", "NS", "later", "lanes", "cuts"])
def table_kernel(
    cu_ptr, segments_ptr, whole_ptr, chunks_ptr, N, T, target, NS, later, lanes, cuts, BS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Segment tables of a ragged batch: `segments` [NS, 8] with at most `target` steps a segment, cut a block of 16 later if `later` is 1;
    `whole` [N, lanes, 8] the lanes of each sequence, up to four; `cuts` holds where the second and later ones begin, 10 bits each. Both
    hold the sequences by falling length, so those that are cut come first and the last blocks to start are short. `chunks` [N] int32,
    unless None: the number of each sequence's first chunk of CHUNK tokens.

    cu_ptr [N + 1] int32 or int64. Grid (ceil(N / BS),): a program writes the rows of BS sequences and holds them against all others, BS at
    a time. A fall of cu_seqlens counts as an empty sequence."""
    n = tl.program_id(0) * BS + tl.arange(0, BS)
    reached = 0  # the largest bound before this program's
    for b in range(0, tl.program_id(0) * BS, BS):
        reached = tl.maximum(reached, tl.max(bound_at(cu_ptr, b + tl.arange(0, BS), N, T), 0))
    first = tl.maximum(tl.associative_scan(bound_at(cu_ptr, n, N, T), 0, larger), reached)
    stop = tl.maximum(bound_at(cu_ptr, n + 1, N, T), first)
    rank = tl.zeros([BS], tl.int32)  # of the sequence by length
    before = rank  # segments of the sequences before it in that order
    chunk = rank  # chunks of the sequences before it in the batch's
    total = 0
    reached = 0
    for b in range(0, N, BS):
        m = b + tl.arange(0, BS)
        lo = tl.maximum(tl.associative_scan(bound_at(cu_ptr, m, N, T), 0, larger), reached)
        hi = tl.maximum(bound_at(cu_ptr, m + 1, N, T), lo)
        reached = tl.max(hi, 0)
        length = tl.where(m < N, hi - lo, -1)
        parts = tl.where(m < N, tl.maximum(((hi - lo + 31) // 32 + target - 1) // target, 1), 0)
        mine = (stop - first)[:, None]
        sooner = (length[None, :] > mine) | ((length[None, :] == mine) & (m[None, :] < n[:, None]))
        rank += tl.sum(sooner.to(tl.int32), 1)
        before += tl.sum(tl.where(sooner, parts[None, :], 0), 1)
        total += tl.sum(parts, 0)
        if chunks_ptr is not None:
            chunk += tl.sum(tl.where(m[None, :] < n[:, None], ((hi - lo + CHUNK - 1) // CHUNK)[None, :], 0), 1)
    if chunks_ptr is not None:
        tl.store(chunks_ptr + n, chunk, mask=n < N)
    steps = (stop - first + 31) // 32
    count = tl.maximum((steps + target - 1) // target, 1)
    begin = first
    for i in range(lanes):
        end = tl.where(i == lanes - 1, stop, lane_at(first, steps, (cuts >> 10 * i) & 1023))
        some = (begin < end) | (i == lanes - 1)  # a lane of no rows is not used; a sequence of none is its last lane's
        _store_row(whole_ptr, lanes * rank + i, n < N, tl.where(some, n, -1), begin, end, first, stop, before, count)
        begin = end
    shift = tl.where((stop - first - 1) % 32 >= 16, 16 * later, 0)  # where the last step has more than a block
    for i in range(tl.max(tl.where(n < N, count, 0), 0)):  # rounded up: the last, which writes final_state, is a short one
        begin = first + 32 * ((i * steps + count - 1) // count) + tl.where(i > 0, shift, 0)
        end = tl.minimum(first + 32 * (((i + 1) * steps + count - 1) // count) + shift, stop)
        _store_row(segments_ptr, before + i, (n < N) & (i < count), n, begin, end, first, stop, before, count)
    if tl.program_id(0) == 0:
        none = tl.zeros([BS], tl.int32)
        for s in range(total, NS, BS):
            row = s + tl.arange(0, BS)
            _store_row(segments_ptr, row, row < NS, none - 1, none, none, none, none, none, none + 1)


@triton.jit
def _store_row(ptr, s, mask, sequence, begin, end, first, stop, segment, count):
    row = ptr + s * COLUMNS
    tl.store(row, sequence, mask=mask)
    tl.store(row + 1, begin, mask=mask)
    tl.store(row + 2, end, mask=mask)
    tl.store(row + 3, first, mask=mask)
    tl.store(row + 4, stop, mask=mask)
    tl.store(row + 5, segment, mask=mask)
    tl.store(row + 6, count, mask=mask)
    tl.store(row + 7, sequence * 0, mask=mask)


@gluon.jit
def first_unknown(known, table, at, count, stop):
    """The first row of the first one of segments [at, at + count), those of a sequence, whose entry state is not known, else `stop`, its
    end. known is this head's row, table the segments'"""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    low = stop
    for j in range(1, count, 128):
        s = j + gl.arange(0, 128, layout=L)
        begin = gl.load(table + (at + s) * COLUMNS + 1, mask=s < count, other=0)
        low = gl.minimum(low, gl.min(gl.where(gl.load(known + at + s, mask=s < count, other=1) == 0, begin, stop), 0))
    return low


class Deal(NamedTuple):
    """The items of a launch, segments times heads, heads first. Where there are more than blocks, blocks take several in turn (T.split is
    "turns"), block b of P first item b. In a ragged batch it then takes the first that nobody has, by a ticket, when it has requested all
    tiles of its last: the longest are first. Else b + P, ...: all are as long. Results do not depend on who takes what."""

    segments_ptr: object  # the table
    tickets_ptr: object  # a table whose column 7 counts, row by row for the parts of V, the items taken beyond the blocks' first; or None
    known_ptr: object
    chunks_ptr: object  # [N] int32, the numbers of the sequences' first chunks; None where no chunk-entry states are written
    items: object
    HV: object
    group: object  # value heads of a q/k head
    NS: object
    tail: object  # steps of a tail


class Queue(NamedTuple):
    """By which the role that takes tickets tells the others; all None without tickets"""

    items: object  # [DEPTH, 1] int32
    told: object  # [DEPTH] barriers
    heard: object


DEPTH = gl.constexpr(4)  # items ahead at most


@gluon.jit
def make_queue():
    items = gl.allocate_shared_memory(gl.int32, [DEPTH, 1], plain_shared(1))
    told = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(DEPTH):
        mbarrier.init(told.index(s), count=1)
        mbarrier.init(heard.index(s), count=3)  # the scan and both preparations
    return Queue(items, told, heard)


@gluon.jit
def next_item(deal, queue, item, turn, tells: gl.constexpr):
    """The item that this block takes after `item`, its turn-th from 0; deal.items or more if there is none. One role tells the others."""
    if deal.tickets_ptr is None:
        return item + gl.num_programs(0)
    else:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        slot = turn % DEPTH
        phase = (turn // DEPTH) & 1
        if tells:
            mbarrier.wait(queue.heard.index(slot), phase ^ 1)
            found = gl.num_programs(0) + gl.atomic_add(deal.tickets_ptr + gl.program_id(1) * COLUMNS + 7, 1)
            queue.items.index(slot).store(gl.full([1], found, gl.int32, L))
            mbarrier.arrive(queue.told.index(slot), count=1)
        else:
            mbarrier.wait(queue.told.index(slot), phase)
            gl.thread_barrier()  # each thread has waited; without it racecheck reports the items
            found = gl.max(queue.items.index(slot).load(L), 0)
            gl.thread_barrier()  # every warp has read it
            mbarrier.arrive(queue.heard.index(slot), count=1)
        return found


class Row(NamedTuple):
    """An item: a segment, its row of the segment table, and a head"""

    segment: object
    head: object
    qk_head: object
    sequence: object
    begin: object
    end: object
    first: object
    stop: object
    at: object  # first segment of the sequence
    count: object


@gluon.jit
def read_row(deal, item):
    segment = item // deal.HV
    row = deal.segments_ptr + segment * COLUMNS
    head = computed_here(item % deal.HV)  # else each role divides anew, once it has waited for the launches before
    return Row(
        segment, head, computed_here(head // deal.group), gl.load(row), gl.load(row + 1), gl.load(row + 2), gl.load(row + 3),
        gl.load(row + 4), gl.load(row + 5), gl.load(row + 6),
    )  # fmt: skip


@gluon.jit
def begin_item(deal, first, writes: gl.constexpr, T: gl.constexpr):
    """The work of the block's first item, for one of its roles, from what the block hands over: its row, or with T.located its work. A role
    itself waits for the end of the launches before: the row, barriers and the hand-over, which read nothing that a launch writes, are done
    by then. `writes`: this role tells what it finds"""
    if T.cluster:
        meet()
    if T.located:
        return first
    else:
        if T.pdl and T.fixed:
            gdc_wait()
        return locate(deal, first, writes, T)


@gluon.jit
def each_item(take: gl.constexpr, work, deal, queue, tells: gl.constexpr, args, T: gl.constexpr):
    """take(work, before, *args, T) of the block's first item and, where blocks take several in turn, of those after it; `before` groups
    have been in the ring by then. `tells`: this role tells the others which items come"""
    if T.split == "turns":
        before = 0
        turn = 0
        item = gl.program_id(0)
        while item < deal.items:
            take(work, before, *args, T)
            before += group_count(work.steps, T)
            item = next_item(deal, queue, item, turn, tells)
            turn += 1
            if item < deal.items:
                work = locate(deal, read_row(deal, item), False, T)
    else:
        take(work, 0, *args, T)


@gluon.jit
def locate(deal, row, writes: gl.constexpr, T: gl.constexpr):
    """The work of an item. T.split says what the item is:

    none, turns   the segment, which is a whole sequence
    lanes         the segment, after all of its sequence before it, of which the state alone is asked
    segments      the segment, from its entry state
    rest          as lanes, the rows of the segment from the first one on whose entry state is not known. Its arithmetic may be another
                  than that of the launch before it, which wrote the others
    whole         the same; says in `known` of the sequence's first segment which these are. Its arithmetic is that of `segments_all`: where
                  the second segment's entry state is not known, it writes the first one too, whose bits do not depend on who does
    segments_all  the segment, if `whole` before it said that its entry state and all before it are known: to look again here made the
                  loops of this kernel spill
    tails         the segment, after `tail` blocks before it that may give its entry state
    state         with tail > 0 the last `tail` blocks of the segment, for the entry state of the next one; with tail = 0 the segment's
                  (M, b), if the next one's entry state is not known"""
    row0 = gl.program_id(1) * T.R
    segment, head, qk_head, sequence, begin, end, first, stop, at, count = row
    is_last = (end == stop).to(gl.int32)
    active = (sequence >= 0).to(gl.int32)
    start = begin
    back = begin * 0
    chunk = begin * 0
    known = deal.known_ptr
    if T.split != "none" and T.split != "turns" and T.split != "lanes":
        known += head * deal.NS
    if T.split == "whole" or T.split == "rest":
        table = deal.segments_ptr - deal.NS * COLUMNS  # it ends where that of the lanes begins
        unknown = first_unknown(known, table, at, count, stop)
        if T.split == "whole":
            unknown = gl.where(gl.load(known + at + 1, mask=count > 1, other=1) == 0, first, unknown)
            if writes:
                if (row0 == 0) & (begin == first):
                    gl.store(known + at, unknown)
        begin = gl.maximum(begin, unknown)
        active = active * (begin < end).to(gl.int32)
    if late(T):
        back = (begin - first) // 16
        start = first
    if T.split == "segments_all":
        active = gl.where(count > 1, active * (begin < gl.load(known + at)).to(gl.int32), active)
    if T.split == "tails":
        back = gl.minimum(deal.tail, (begin - first) // 16)
        start = begin - 16 * back
    if T.split == "state":
        active = active * (1 - is_last)
        if deal.tail > 0:
            start = gl.maximum(begin, end - 16 * deal.tail)
        elif active != 0:
            active = 1 - gl.load(known + segment + 1)
    if T.chunk > 0:
        chunk = gl.load(deal.chunks_ptr + gl.maximum(sequence, 0))
    live = active != 0
    steps = gl.where(live, (end - start + 31) // 32, 0)
    return Work(
        sequence, start, end, steps, gl.where(live, back, 0), head, qk_head, row0, live & (start == first),
        live & (start != first), live & (is_last != 0), first, chunk,
    )  # fmt: skip


@triton.jit(do_not_specialize=["HV", "NS", "cut"])
def combine_kernel(
    summary_ptr, entry_ptr, known_ptr, whole_ptr, HV, NS, cut,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """entry[s + 1] = entry[s] M_s + b_s where it is not known, over the segments of a sequence, for ROWS rows of V. b of the first segment
    starts from the initial state. Stops at the last unknown segment. Grid (any, HV, V / ROWS): a program takes one of so many of the first
    `cut` sequences, up to the first that is not cut.

    M is a sum of two bf16 matrices (16 bits of mantissa) and so is the state: three products, in fp32 sums."""
    if PDL:
        gdc_launch_dependents()
        if not FIXED:
            gdc_wait()
    head = tl.program_id(1)
    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, K)
    n = tl.program_id(0)
    count = tl.load(whole_ptr + n * COLUMNS + 6)
    s0 = tl.load(whole_ptr + n * COLUMNS + 5)
    if PDL and FIXED:
        gdc_wait()
    while count > 1:
        known = known_ptr + head * NS + s0
        end = 0
        for j in range(1, count, 128):
            s = j + tl.arange(0, 128)
            end = tl.maximum(end, tl.max(tl.where(tl.load(known + s, mask=s < count, other=1) == 0, s, 0), 0))
        S = tl.zeros([ROWS, K], tl.float32)
        for j in tl.range(0, end, num_stages=3):
            at = (s0 + j).to(tl.int64) * HV + head
            base = summary_ptr + at * (K * V + K * K)
            b = tl.load(base + r * K + k[None, :])
            parts = (base + K * V).to(tl.pointer_type(tl.bfloat16), bitcast=True) + k[:, None] * K + k[None, :]
            high = tl.load(parts)
            low = tl.load(parts + K * K)
            out = entry_ptr + (at + HV) * (K * V) + r * K + k[None, :]
            found = tl.load(known + j + 1) != 0
            S_high = S.to(tl.bfloat16)
            S_low = (S - S_high.to(tl.float32)).to(tl.bfloat16)
            chained = tl.dot(S_high, high, tl.dot(S_low, high, tl.dot(S_high, low, b)))
            S = tl.where(found, tl.load(out), chained)
            tl.store(out, S)
        n += tl.num_programs(0)
        count = tl.load(whole_ptr + n * COLUMNS + 6, mask=n < cut, other=1)
        s0 = tl.load(whole_ptr + n * COLUMNS + 5, mask=n < cut, other=0)
