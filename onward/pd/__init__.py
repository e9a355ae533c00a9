"""The handoff of a prompt's KV from a prefill instance (P) to a decode instance (D): two machines without I/O.

    D   asked ──PrefillOffer──> offered ──grant()──> granted ──PrefillDone and on_kv_received()──> KvArrived
    P   queued ──offer()──> offered ──LeaseGrant──> granted ──ready()──> ready ──PrefillTaken──> HandoffCompleted

A failure leads from every state of D to `HandoffFailed`, from every state of P to `HandoffCancelled`, and the other side
is told. Messages may be lost, doubled, delayed and reordered: what must be answered is repeated, what is repeated is
answered in the same way, and what is never answered ends with a lease. They are described in `onward.proto.handoff`.

The driver of a machine gives it everything that has arrived before it calls `tick` with the same time: a message that
comes in the same turn as its deadline is in time. After each turn it takes the events and sends what `take_messages`
returns. The machines know neither sockets nor clocks, neither blocks nor requests.
"""
