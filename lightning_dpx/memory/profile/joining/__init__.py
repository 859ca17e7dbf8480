"""Profiles of steps that call different parts of a module become the profile of a step that calls them all.

Where layers are skipped by chance, a step may call together what no profiled step has called together. What a call
saves and takes is the same whatever else is called: so the calls that one profile, the *base*, lacks are cut out of
another one, the *donor*, and stand where they belong in the order of forward. A *piece* is what is cut out in one go.

    events of the base    | forward  a   b   |   d | backward  d   |   b   a |
    of the donor                             c   ^                 c   ^        ^ is a cut
    joined                | forward  a   b  [ c ] d | backward  d [ c ]  b   a |

What is between the cuts keeps its course, and lies by so much higher as the pieces keep that stand before it.

call_counts     which calls a step makes, and in which of them steps differ
join_steps      the order of it all: the base, and each other profile put into it
splice          which values of the donor are pieces, and where each belongs in the base
event_map       the number that an event of either step has in the joined one
joined_curve    bytes at every event, and what each piece keeps
joined_values   storages, values, and what each value is made from
joined_requests what backward asks for
joined_calls    calls that can be replayed, and what autograd holds
"""
