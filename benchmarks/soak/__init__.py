"""A server under everything at once, for as long as one likes: traffic, disconnects, faults, restarts.

`prefixwise serve` runs on a small checkpoint (Qwen3, random weights) behind a launcher that can make its device fail
(`benchmarks.soak.launcher`). Clients send scoring requests of every kind, rerank dialects, pins, wrong and oversized
requests; they disconnect, read slowly, set deadlines and send more than the queue takes. Meanwhile the device raises,
gives NaN, answers in the wrong shape, runs out of memory, hangs and dies, and the process is terminated, killed and
started again. In the first half the server is restarted again and again; the second half is one process.

Judged, with exit status 1 where a verdict fails (`benchmarks.soak.verdicts`):

    bits       every score is that of its item alone, computed at the start, bit for bit
    errors     a 5xx or a lost connection only while a fault or a restart explains it
    endings    every request gets its scores or a documented error; none waits for ever
    faults     each does what the documentation says: the requests run again, or the process ends with its status
    resources  memory, file descriptors and threads of an idle server do not grow; KV blocks in use and pins are 0

The run is a file (`--recording`), and verdicts and report are made from that alone (`--render` makes them again). The
last line is JSON.

    python -m benchmarks.soak [--minutes 60] [--report FILE.html] [--recording FILE.json] [--seed 0] [--clients 6]
"""
