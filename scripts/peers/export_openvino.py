#!/usr/bin/env python3
"""Export a Hugging Face folder to OpenVINO IR: ``export_openvino.py FOLDER OUTPUT float32|int8``.

Run by ``model_files.py`` with the Python of openvino-genai's environment.
"""

import sys


def main() -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig

    model, output, precision = sys.argv[1:]
    settings = {
        "float32": OVConfig(dtype="fp32"),
        "int8": OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8)),
    }
    main_export(model, output, task="text-generation-with-past", ov_config=settings[precision])


if __name__ == "__main__":
    main()
