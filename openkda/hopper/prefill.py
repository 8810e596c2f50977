"""The Hopper forward: kernels. Grid (segments x HV, V / R); a block owns one segment of one sequence, one value head and R
rows of V, and walks its tokens in blocks of 16:

    default partition   scan_warps warps    the recurrence and the output (scan.py, scan_steps.py), or the state alone (scan_states.py)
    preps x prep_warps                      activation, norms, decay, scores, inverse, one warp or two a block (prep.py, spread.py)
    4 x 1 warp                              request the raw tiles of g, k, q, v, two blocks at a time

Equations, names: docs/math.md. Algorithm, schedule, budgets and measurements: docs/hopper_prefill.md."""

from __future__ import annotations

from openkda.hopper.compat import gdc_launch_dependents, gdc_wait, gl, gluon
from openkda.hopper.own import Verdict, make_verdict
from openkda.hopper.prep import load_role, prep_role, receive_role, send_role
from openkda.hopper.scan import Output, Sink, States, scan_rows, scan_two_rows
from openkda.hopper.scan_states import summary_scan
from openkda.hopper.scan_steps import scan_steps
from openkda.hopper.segments import Deal, Queue, begin_item, each_item, locate, make_queue, read_row
from openkda.hopper.tiles import Source, make_ring, tile_layout


@gluon.jit
def scan_item(work, before, ring, src, out, states, sink, verdict, segment, HV, NS, T: gl.constexpr):
    """An item of the forward, when `before` groups have been in the ring"""
    if T.form == "steps":
        scan_steps(ring, out, states, work, HV, T)
    elif T.R == 64:
        scan_rows(ring, before, out, states, work, segment, HV, NS, T)
    else:
        scan_two_rows(ring, before, src, out, states, sink.known_ptr, verdict, work, segment, HV, NS, T)


@gluon.jit
def scan_role(ring, src, out, states, sink, deal, queue, verdict, first, HV, NS, T: gl.constexpr):
    work = begin_item(deal, first, True, T)
    segment = gl.program_id(0) // HV if T.located else first.segment
    if T.outputs:
        each_item(scan_item, work, deal, queue, False, (ring, src, out, states, sink, verdict, segment, HV, NS), T)
    else:
        summary_scan(ring, states, sink, work, segment, HV, NS, T)


@gluon.jit
def run_roles(scan, ring, src, deal, queue, verdict, first, T: gl.constexpr):
    """The scan, with arguments `scan`, in the default partition beside the preparation and the load warps. State-only passes have no q and
    one preparation partition."""
    regs: gl.constexpr = T.prep_regs
    if T.split == "turns":
        gl.warp_specialize(
            [
                (scan_role, scan),
                (prep_role, (ring, src, deal, queue, verdict, first, 0, T)),
                (prep_role, (ring, src, deal, queue, verdict, first, 1, T)),
                (load_role, (ring, src, deal, queue, first, "gkqv", T)),
            ],
            [T.prep_warps, T.prep_warps, 1],
            [regs, regs, 24],
        )
    elif T.cluster:
        gl.warp_specialize(
            [
                (scan_role, scan),
                (prep_role, (ring, src, deal, queue, verdict, first, 0, T)),
                (load_role, (ring, src, deal, queue, first, "gk", T)),
                (load_role, (ring, src, deal, queue, first, "qv", T)),
                (receive_role, (ring, src, deal, first, T)),
                (send_role, (ring, deal, first, T)),
            ],
            [T.prep_warps, 1, 1, 1, 1],
            [regs, 24, 24, 24, 24],
        )
    elif T.outputs and T.preps == 1:
        gl.warp_specialize(
            [
                (scan_role, scan),
                (prep_role, (ring, src, deal, queue, verdict, first, 0, T)),
                (load_role, (ring, src, deal, queue, first, "g", T)),
                (load_role, (ring, src, deal, queue, first, "k", T)),
                (load_role, (ring, src, deal, queue, first, "q", T)),
                (load_role, (ring, src, deal, queue, first, "v", T)),
            ],
            [T.prep_warps, 1, 1, 1, 1],
            [regs, 24, 24, 24, 24],
        )
    elif T.outputs:
        gl.warp_specialize(
            [
                (scan_role, scan),
                (prep_role, (ring, src, deal, queue, verdict, first, 0, T)),
                (prep_role, (ring, src, deal, queue, verdict, first, 1, T)),
                (load_role, (ring, src, deal, queue, first, "g", T)),
                (load_role, (ring, src, deal, queue, first, "k", T)),
                (load_role, (ring, src, deal, queue, first, "q", T)),
                (load_role, (ring, src, deal, queue, first, "v", T)),
            ],
            [T.prep_warps, T.prep_warps, 1, 1, 1, 1],
            [regs, regs, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (scan_role, scan),
                (prep_role, (ring, src, deal, queue, verdict, first, 0, T)),
                (load_role, (ring, src, deal, queue, first, "g", T)),
                (load_role, (ring, src, deal, queue, first, "k", T)),
                (load_role, (ring, src, deal, queue, first, "v", T)),
            ],
            [T.prep_warps, 1, 1, 1],
            [regs, 24, 24, 24],
        )


@gluon.jit(do_not_specialize=["items", "HV", "group", "NS", "tail"], do_not_specialize_on_alignment=["beta_ptr"])
def forward_kernel(
    q_desc, k_desc, v_desc, g_desc, o_desc, o_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, final_ptr, entry_ptr, h_ptr,
    known_ptr, segments_ptr, tickets_ptr, chunks_ptr, items, HV, group, NS, tail, lower_bound, scale,
    T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """o, final_state and chunk-entry states of the work that T.split assigns to this launch"""
    R: gl.constexpr = T.R
    if T.pdl:
        gdc_launch_dependents()
        if T.located or not T.fixed:
            gdc_wait()
    deal = Deal(segments_ptr, tickets_ptr, known_ptr, chunks_ptr, items, HV, group, NS, tail)
    row = read_row(deal, gl.program_id(0))
    first = locate(deal, row, True, T) if T.located else row
    if T.cluster and T.located:
        if first.steps == 0:  # as for the other block
            return
    src = Source(q_desc, k_desc, v_desc, g_desc, beta_ptr, A_log_ptr, dt_bias_ptr, HV, lower_bound, scale)
    ring = make_ring(src, T)
    queue = make_queue() if tickets_ptr is not None else Queue(None, None, None)
    norms: gl.constexpr = T.spread and T.l2norm
    out = Output(o_desc, o_ptr, gl.allocate_shared_memory(o_desc.dtype, [2, 16, R], tile_layout(16)), scale if norms else None)
    states = States(initial_ptr, final_ptr, entry_ptr, h_ptr)
    sink = Sink(None, known_ptr, tail)
    verdict = make_verdict(T) if T.split == "tails" else Verdict(None, None)
    run_roles((ring, src, out, states, sink, deal, queue, verdict, first, HV, NS, T), ring, src, deal, queue, verdict, first, T)


@gluon.jit(do_not_specialize=["HV", "group", "NS", "tail"], do_not_specialize_on_alignment=["beta_ptr"])
def state_kernel(
    k_desc, v_desc, g_desc, beta_ptr, A_log_ptr, dt_bias_ptr, initial_ptr, entry_ptr, summary_ptr, known_ptr, segments_ptr, HV, group, NS,
    tail, lower_bound, T: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The state alone: entry states from tails (tail > 0), or (M, b) of the segments whose successor's entry state is not known"""
    if T.pdl:
        gdc_launch_dependents()
        if not T.fixed:
            gdc_wait()
    deal = Deal(segments_ptr, None, known_ptr, None, gl.num_programs(0), HV, group, NS, tail)
    row = read_row(deal, gl.program_id(0))
    src = Source(k_desc, k_desc, v_desc, g_desc, beta_ptr, A_log_ptr, dt_bias_ptr, HV, lower_bound, 1.0)
    ring = make_ring(src, T)
    queue = Queue(None, None, None)
    states = States(initial_ptr, None, entry_ptr, None)
    sink = Sink(summary_ptr, known_ptr, tail)
    verdict = Verdict(None, None)
    run_roles((ring, src, None, states, sink, deal, queue, verdict, row, HV, NS, T), ring, src, deal, queue, verdict, row, T)
