"""Rows in, prompts made, results out. Nothing here imports torch.

=================  ==================================================================================
`rows`             the records that pass between the parts
`json_text`        strict JSON that changes no value
reading            `source`: `files`, `jsonl`, `compression`, `parquet`, `hub`, `filters`
prompting          `prompt`: `template`; in a process of its own: `feed`, `feed_worker`
`openai_batch`     OpenAI batch files: lines checked, the request of each, the line that answers it
writing            `sink`: `records`, `results`, `parts`, `columns`; read again by `view`
storing            `store`: durable files and exclusive creation; `lease`: who may write
failing            `patience`: what is tried again; reading that goes on where it broke off
=================  ==================================================================================
"""
