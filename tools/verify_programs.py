"""The programs of ``verify.py``: commands of other projects, with budgets below their need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).parent
_SEEDED = str(_HERE / "verify_seeded.py")
_TRAINERS = str(_HERE / "verify_trainers.py")


@dataclass(frozen=True)
class Program:
    """A command of a project, its requirements, and the items to compare.

    Attributes:
        repository: on GitHub; empty for our own script around a package.
        source, folder: folder of the clone, and the folder in it that is copied and in which the command runs.
        packages: modules that must be importable.
        data: candidate source files by target path, copied if the target is missing.
        prepare: commands that run before it, by plain Python.
        search: folders for the module search path.
        files: patterns of saved files.
        lines: number of output lines after which it is interrupted; None: run to the end.
    """

    name: str
    command: tuple[str, ...]
    budget: str
    repository: str = ""
    source: str = ""
    folder: str = "."
    packages: tuple[str, ...] = ()
    data: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prepare: tuple[tuple[str, ...], ...] = ()
    search: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    lines: int | None = None

    @property
    def is_suite(self) -> bool:
        return self.command[:2] == ("-m", "pytest")


def _example(folder: str, *command: str, budget: str, name: str = "", **fields: object) -> Program:
    return Program(
        f"examples/{name or folder}",
        command,
        budget,
        "pytorch/examples",
        "examples",
        folder,
        **fields,  # type: ignore[arg-type]
    )


def _words(model: str, budget: str) -> Program:
    return _example(
        "word_language_model", "main.py", "--epochs", "1", "--model", model, "--emsize", "400", "--nhid", "400",
        "--save", "model.pt", "--log-interval", "5", budget=budget, name=f"{model} language model",
        data={"data/wikitext-2/train.txt": ("examples/word_language_model/data/wikitext-2/valid.txt",)}, lines=3,
    )  # fmt: skip


PROGRAMS = (
    Program(
        "nanoGPT",
        (
            "train.py",
            "config/train_shakespeare_char.py",
            "--device=cpu",
            "--compile=False",
            "--dtype=float32",
            "--batch_size=4",
            "--max_iters=4",
            "--eval_iters=1",
            "--eval_interval=4",
            "--log_interval=1",
        ),
        "256MiB",
        "karpathy/nanoGPT",
        "nanoGPT",
        packages=("requests",),
        data={
            "data/shakespeare_char/input.txt": (
                "nanoGPT/data/shakespeare_char/input.txt",
                "examples/distributed/minGPT-ddp/mingpt/data/input.txt",
            )
        },
        prepare=(("data/shakespeare_char/prepare.py",),),
        files=("out-shakespeare-char/ckpt.pt",),
    ),
    _words("Transformer", "192MiB"),
    _words("LSTM", "192MiB"),
    _example(
        "dcgan",
        "main.py",
        "--dataset",
        "fake",
        "--niter",
        "1",
        "--dry-run",
        "--manualSeed",
        "1",
        "--workers",
        "0",
        budget="128MiB",
        packages=("torchvision",),
        files=("*.pth", "*.png"),
    ),
    _example(
        "time_sequence_prediction",
        "train.py",
        "--steps",
        "1",
        budget="256MiB",
        lines=3,
        packages=("matplotlib",),
        prepare=(("generate_sine_wave.py",),),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # it loads a NumPy array
    ),
    _example("reinforcement_learning", "reinforce.py", budget="2MiB", packages=("gymnasium",), lines=8),
    _example(
        "imagenet",
        "main.py",
        "--dummy",
        "--no-accel",
        "--seed",
        "1",
        "-a",
        "resnet18",
        "-b",
        "8",
        "-j",
        "0",
        "--epochs",
        "1",
        "-p",
        "1",
        budget="144MiB",
        packages=("torchvision",),
        lines=5,
    ),
    Program(
        "MONAI 3D U-Net",
        (_SEEDED, "unet_training_dict.py"),
        "1GiB",
        "Project-MONAI/tutorials",
        "tutorials",
        "3d_segmentation/torch",
        packages=("monai", "nibabel", "tensorboard"),
        lines=36,
    ),
    Program(
        "timm's tests",
        (
            "-m",
            "pytest",
            "-q",
            "tests/test_layers_pool.py",
            *(
                f"tests/test_models.py::test_model_backward[2-{name}]"
                for name in (
                    "resnet18",
                    "convnext_atto",
                    "efficientnet_b0",
                    "vit_tiny_patch16_224",
                    "mobilenetv3_small_100",
                )
            ),
        ),
        "64MiB",
        "huggingface/pytorch-image-models",
        "pytorch-image-models",
        packages=("torchvision",),
    ),
    Program(
        "PEFT's tests",
        ("-m", "pytest", "-q", "tests/test_custom_models.py", "-k", "test_training_custom_models and lora"),
        "1536KiB",
        "huggingface/peft",
        "peft",
        packages=("transformers", "accelerate", "diffusers", "pytest_cov"),
        search=("src",),
    ),
    Program(
        "PyTorch Geometric's tests",
        (
            "-m",
            "pytest",
            "-q",
            *(f"test/nn/conv/test_{name}_conv.py" for name in ("gat", "gcn", "sage", "rgcn", "transformer")),
            "-k",
            "not compile",
        ),
        "1MiB",
        "pyg-team/pytorch_geometric",
        "pytorch_geometric",
    ),
    Program("transformers' Trainer", (_TRAINERS, "transformers"), "160MiB", packages=("transformers", "accelerate")),
    Program("TRL's SFTTrainer", (_TRAINERS, "trl"), "160MiB", packages=("trl", "datasets", "tokenizers")),
    Program("Lightning's Trainer", (_TRAINERS, "lightning"), "72MiB", packages=("lightning",)),
)
