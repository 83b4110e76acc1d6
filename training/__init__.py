"""The making of the bundled model: corpus, tokenizer, target, distilled draft, evaluation.

Each module is one command, run in this order (``--help`` on each)::

    python -m slipstream.training.corpus      # standard library -> text, split by file
    python -m slipstream.training.tokenizer   # byte-level BPE, and the corpus as token ids
    python -m slipstream.training.prompts     # held-out prompts for evaluation and demos
    python -m slipstream.training.target      # the target model
    python -m slipstream.training.sample      # text sampled from the target
    python -m slipstream.training.distil      # the standalone draft
    python -m slipstream.training.distil_eagle3  # the EAGLE-3 head; also one for any other target
    python -m slipstream.training.evaluate    # bits per byte, accept lengths -> JSON
    python -m slipstream.training.plot        # loss curves -> PNG
"""
