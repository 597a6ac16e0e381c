"""Clients on a host: each sends one request after the other, and a line of JSON says how each of them ended.

    python -m tests.hosts.client NUM_CLIENTS URL [URL ..]

They take the URLs in turn, as a load balancer does. They end, after their last answer, when standard input is closed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from itertools import count

import httpx

from tests.cluster.ray_cluster import score_body

HANGS_AFTER = 90.0  # seconds; every answer must come before
writing = threading.Lock()


def send_all(client: int, urls: list[str], stopped: threading.Event) -> None:
    for number in count():
        if stopped.is_set():
            return
        query, url = client * 10 + number % 10, urls[(client + number) % len(urls)]
        start = time.time()
        try:
            response = httpx.post(url + "/v1/score", json=score_body(query, number), timeout=HANGS_AFTER)
            status, replica = response.status_code, response.headers.get("x-prefixwise-replica")
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            status, replica, answer = 0, None, f"{url}: {error!r}"
        found = {"query": query, "seed": number, "status": status, "replica": replica, "answer": answer}
        line = json.dumps({**found, "start": start, "seconds": time.time() - start})
        with writing:
            print(line, flush=True)


def main(num_clients: str, *urls: str) -> None:
    stopped = threading.Event()
    clients = [
        threading.Thread(target=send_all, args=(number, list(urls), stopped)) for number in range(int(num_clients))
    ]
    for client in clients:
        client.start()
    sys.stdin.read()
    stopped.set()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
