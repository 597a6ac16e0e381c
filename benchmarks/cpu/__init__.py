"""All goals of CPU speed: ours and its peers, round by round beside each other on the same machine.

Every peer is a process of its own that loads its model, looks for its best settings, and then waits to be asked
for a round; one is asked at a time, and each round asks all of them, in an order that turns. What is held to a goal is
the median of the rounds' ratios, beside the lowest and the highest. On a CPU only ratios within a run hold, and the
machine should have nothing else to do. Cases:

    hf      Qwen3-0.6B's shape, random weights, 500 + 64 x 20 tokens, every query new: the items/s of our PyTorch
            backend over those of Hugging Face, in the same dtype
              hf-prefix  keys and values of the query computed once and expanded to batches of items
              hf-full    query and item as one sequence; timed over fewer items
    llama   the embedded model, 200 + 50 x 20: over llama.cpp on the same GGUF file, the query's cells shared by the
            sequences of the items. Left out where `llama-cpp-python` is not installed
    gemm    the contract workload, 2000 + 500 x 20, Qwen3-0.6B's shape: floating-point operations by the floor's count
            (`benchmarks.contract.floor_flops`) per second, over those of the model's own four GEMMs, through
            the fastest of torch's linear layers
    gemm-short  the same on 500 + 64 x 20
    score   seconds of a whole `prefixwise score` on the embedded model, whose file was read before
    serve   seconds from the start of `prefixwise serve` on the embedded model to the first 200 of `/health`

Rivals must find our probabilities of the labels, within a bound that covers the dtype; where one does not, its row says
so and is held to nothing. The last line is JSON; the exit status is 1 where something could not be measured or does not
agree, not where a goal is missed.

    pip install --editable '.[torch,server,harness,bench]'
    python -m benchmarks.cpu [--only CASE]... [--rounds N] [--model-folder FOLDER] [--output FILE] [--tiny]
"""
