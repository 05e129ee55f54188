"""Models as files that run without this library: for ONNX Runtime, or compiled by AOTInductor for torch.

export_model       a model in memory to a new folder
export_folder      a saved model to a new folder, as `tokenformer export` does
Exported           what was written, and how far it is from the model
"""

from .export import FORMATS, Exported, export_folder, export_model

__all__ = ["FORMATS", "Exported", "export_folder", "export_model"]
