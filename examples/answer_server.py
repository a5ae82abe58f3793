"""Answer questions over HTTP. Questions that arrive during a batch are answered together in the next one.

    pip install fastapi uvicorn
    python examples/answer_server.py runs/mine --port 8000
    curl localhost:8000/answer --json '{"question": "Where was Ada born?", "context": "Ada was born in London."}'
    curl localhost:8000/health

Anyone who reaches the server can use it: by default, only programs on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from hvd_bert import QuestionAnswerer
from hvd_bert.data.sources.questions import text_mistake
from hvd_bert.data.sources.squad import Question
from hvd_bert.errors import UserError
from hvd_bert.evaluation.postprocess import Candidate


class Request(BaseModel):
    """The body of a request. With `top_k`, the reply is a list of the best different answers."""

    question: str
    context: str
    top_k: int | None = Field(None, ge=1)


class Batches:
    """Answers the questions of concurrent requests, at most `size` at once. Counts answered questions and batches."""

    def __init__(self, qa: QuestionAnswerer, size: int) -> None:
        self.qa, self.size = qa, size
        self.waiting: asyncio.Queue[tuple[Request, asyncio.Future[Any]]] = asyncio.Queue()
        self.questions = self.batches = 0

    async def answer(self, request: Request) -> Any:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait((request, reply))
        return await reply

    async def run(self) -> None:
        """Answer batches, one after the other, in a thread, so that further requests can arrive meanwhile."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            while True:
                batch = [await self.waiting.get()]
                while len(batch) < self.size and not self.waiting.empty():
                    batch.append(self.waiting.get_nowait())
                requests, replies = zip(*batch, strict=True)
                found = await loop.run_in_executor(thread, self.answers, requests)
                for reply, answer in zip(replies, found, strict=True):
                    if reply.cancelled():  # the client has left
                        continue
                    if isinstance(answer, Exception):
                        reply.set_exception(answer)
                    else:
                        reply.set_result(answer)

    def answers(self, requests: Sequence[Request]) -> Sequence[Any]:
        """Answer a batch, requests with the same `top_k` in one call. An error stands for each answer of its call."""
        found: dict[int, Any] = {}
        for top_k in {request.top_k for request in requests}:
            numbers = [number for number, request in enumerate(requests) if request.top_k == top_k]
            asked = [requests[number].model_dump(include={"question", "context"}) for number in numbers]
            try:
                found |= zip(numbers, self.qa(asked, top_k=top_k), strict=True)
                self.questions += len(numbers)
            except Exception as error:  # for example for lack of memory
                found |= dict.fromkeys(numbers, error)
        self.batches += 1
        return [found[number] for number in range(len(requests))]


def make_app(qa: QuestionAnswerer, model: str, batch_size: int) -> FastAPI:
    batches = Batches(qa, batch_size)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batches.run())
        yield  # uvicorn ends this after it has answered all requests
        task.cancel()

    async def answer(request: Request) -> Any:
        if mistake := text_mistake(Question("", "", request.context, request.question, (), ())):
            raise HTTPException(422, f"The question cannot be answered: {mistake}. Change it.")
        found = await batches.answer(request)
        return described(found) if request.top_k is None else [described(each) for each in found]

    async def health() -> dict[str, Any]:
        counts = {"questions": batches.questions, "batches": batches.batches}
        return {"model": model, "device": str(qa.device), **counts}

    app = FastAPI(lifespan=running)
    app.add_api_route("/answer", answer, methods=["POST"])
    app.add_api_route("/health", health)
    return app


def described(answer: Candidate) -> dict[str, Any]:
    return {"answer": answer.text, "start": answer.start, "end": answer.end, "score": answer.score}


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer questions over HTTP.")
    parser.add_argument("model", help="output folder of a training, a checkpoint, or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, default=16, help="questions at once (default: %(default)s)")
    flags = parser.parse_args()
    try:
        qa = QuestionAnswerer(flags.model)
    except UserError as error:
        parser.error(str(error))
    uvicorn.run(make_app(qa, flags.model, flags.batch_size), host=flags.host, port=flags.port)


if __name__ == "__main__":
    main()
