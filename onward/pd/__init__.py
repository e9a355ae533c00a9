"""The handoff of a prompt's KV from a prefill instance (P) to a decode instance (D): two state machines without I/O.

    D   asked ──PrefillOffer──> offered ──grant()──> granted ──PrefillDone and on_kv_received()──> KvArrived
    P   queued ──offer()──> offered ──LeaseGrant──> granted ──ready()──> ready ──PrefillTaken──> HandoffCompleted

A failure leads from every state of D to `HandoffFailed`, from every state of P to `HandoffCancelled`, and the other
side is informed. Messages may be lost, duplicated, delayed and reordered. A message that needs an answer is repeated, a
repeated message gets the same answer, and a handoff without an answer ends with its lease. `onward.proto.handoff`
describes the messages.

The driver of a state machine passes it everything that has arrived before it calls `tick` with the same time. So a
message that arrives in the same turn as its deadline is in time. After each turn the driver takes the events and sends
the messages of `take_messages`. The state machines know neither sockets nor clocks, neither blocks nor requests.
"""
