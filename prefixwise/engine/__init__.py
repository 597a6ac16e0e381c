"""The engine: it schedules the forwards of all live requests, on one thread.

    prepare        request -> tokens and plan (host)          prepare.py
    submit         the scheduler's queue                      admission.py, token_rate.py, request_state.py, branch.py
      fill         a step from all live requests              step_filler.py, step_limits.py, step.py,
                                                              forward_batches.py
      run          its forwards on the device thread          in_flight.py
      deliver      the outputs to their requests              scheduler.py, which runs this loop
    finish         label logits -> scores (host)              results.py

`engine.py` is the entry point, `reranker.py` the same for rerank requests, `prefix_cache.py` the KV cache.
`calibration.py` measures what forwards cost.
"""
