"""A guard for sums of products that loops carry along, on Hopper.

Its products run on while a loop turns. Triton (3.6) counts those that may, but not the registers that a left operand
made by the program is still read from, and the next turn writes to them (triton-lang/triton issue 9433): sums that are
wrong, or not finite, as timing will have it. What reads the sum within the loop is waited for.
"""
# pyright: reportCallIssue=false

import triton
import triton.language as tl


@triton.jit
def settled(acc, going):
    """`acc` once its products are done. going: what the loop goes on by, known to be true; it costs no instruction."""
    return tl.where(going, acc, 0.0)
