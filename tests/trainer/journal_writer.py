"""What a process does that writes a journal until it is killed."""

import random

from skyrl_megatron.data.journal import Journal


def write(folder, seed, said):
    """Append, release and compact in a loop; ``said`` gets what was acknowledged and what is about to be released."""
    rng, journal = random.Random(seed), Journal(folder, segment_bytes=4000)
    held = sorted(sequence for sequence, _ in journal.records())
    count = 0
    while True:
        futures = []
        for _ in range(rng.randrange(1, 8)):
            name, count = f"{seed}-{count}", count + 1
            filling = rng.randbytes(rng.randrange(900)).hex()
            futures.append((name, journal.submit(f"{name}:".encode(), filling.encode())))
        for name, future in futures:
            held.append(future.result())
            said.send(("appended", held[-1], name))
        if rng.random() < 0.4:
            gone = rng.sample(held, len(held) * 2 // 3)
            said.send(("releasing", gone))
            journal.release(gone)
            held = [sequence for sequence in held if sequence not in gone]
            journal.compact()
