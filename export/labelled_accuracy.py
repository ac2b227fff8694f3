"""The accuracy of a file beside its model's, on labelled images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vit_fast.apps.data import read_image
from vit_fast.apps.evaluation import evaluate, labelled_images
from vit_fast.errors import UnsupportedInputError
from vit_fast.libraries.image_model import ImageModel

from .loss import POINTS, Accuracy
from .options import ExportOptions
from .photographs import as_inputs
from .runner import OnnxRunner
from .verification import VerificationError

BATCH = 16


def check_labelled(folder: Path, vit: ImageModel, options: ExportOptions) -> list[tuple[Path, int]]:
    """The labelled images of a folder, for a model that can be asked.

    Raises:
        ImageError, ValueError: see labelled_images.
        UnsupportedInputError: the model or the file does not classify, or nothing says how images are prepared.
    """
    if options.output == "features" or not vit.num_classes:
        raise UnsupportedInputError("validation", ["accuracy is of classes, and this file gives features"])
    if vit.data_config is None:
        raise UnsupportedInputError("validation", [f"{vit.name} has no data_config: pass one"])
    return labelled_images(folder, vit.num_classes, vit.class_names)


def measure_accuracy(
    path: Path, vit: ImageModel, options: ExportOptions, labelled: Sequence[tuple[Path, int]]
) -> Accuracy:
    """Asks the file and the model it was made of, both on the CPU.

    Raises:
        VerificationError: the file loses more than its user would accept.
    """
    image_hw = None if options.preprocess else vit.image_hw
    runner = OnnxRunner(path, "cpu", data_config=vit.data_config, image_hw=image_hw, output=options.output)

    def ask_model(images: list[Image.Image]) -> np.ndarray:
        inputs = as_inputs(images, vit.data_config, vit.image_hw, vit.in_chans)
        answers: np.ndarray = vit.forward(inputs, "logits", False).float().numpy()
        return answers

    files = [file for file, _ in labelled]
    of_file = evaluate(labelled, _answers(files, runner.probabilities))
    with vit.exporting("eager", False), torch.inference_mode():
        of_model = evaluate(labelled, _answers(files, ask_model))
    accuracy = Accuracy(len(files), of_model.top1, of_file.top1)
    if not accuracy.acceptable:
        raise VerificationError(
            f"{options.precision} file must lose at most {POINTS:.1%} of the images, or one: {accuracy.line()}"
        )
    return accuracy


def _answers(files: Sequence[Path], ask: Callable[[list[Image.Image]], np.ndarray]) -> Iterator[np.ndarray]:
    for start in range(0, len(files), BATCH):
        yield from ask([read_image(file) for file in files[start : start + BATCH]])
