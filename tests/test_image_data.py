"""Images as data: where they come from, their classes, how they are decoded, and what happens to bad ones."""

import errno
import logging
import pickle
import re
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from image_files import class_folder, encoded, idx_folder, picture, prepared, table, write_idx
from tokenformer import BadFileError, BadRequestError
from tokenformer.data.images import AugmentSettings, ImageData, ImageSettings
from tokenformer.data.images.data import assign_parts
from tokenformer.data.images.pictures import decode
from tokenformer.data.images.settings import CONSTANTS


def refused(error, message, *args, **settings):
    """Preparing fails with that one line."""
    with pytest.raises(error, match=message) as caught:
        prepared(*args, **settings)
    assert "\n" not in str(caught.value)


def expected(image: Image.Image, size: int = 8) -> torch.Tensor:
    """The slow way: squares only, scaled to [-1, 1]."""
    image = image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


class TestSources:
    def test_a_folder_with_a_sub_folder_for_each_class(self, tmp_path):
        folder = class_folder(tmp_path / "photos", ("dog", "cat", "ant"), each=3)
        (folder / "dog" / "notes.txt").write_text("not an image")
        (folder / "dog" / "more").mkdir()
        picture(99).save(folder / "dog" / "more" / "deep.JPG", "JPEG")
        class_folder(tmp_path / "elsewhere", ("eel",), each=1)
        (folder / "eel").symlink_to(tmp_path / "elsewhere" / "eel")
        (folder / ".hidden").mkdir()
        data = prepared(tmp_path, folder)
        assert data.id2label == {0: "ant", 1: "cat", 2: "dog", 3: "eel"}
        assert data.train.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 4 + [3]
        sample = data.train[3]
        assert sample["pixel_values"].shape == (3, 8, 8)
        assert sample["pixel_values"].dtype == torch.float32
        assert sample["labels"] == 1
        assert isinstance(sample["labels"], int)
        assert data.stats == {"train": 11}

    def test_parquet_with_and_without_what_datasets_says_of_its_columns(self, tmp_path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        images = [encoded(picture(i, 8, 8)) for i in range(4)]
        table([1, 0, 1, 0], images, ["no", "yes"], image="img").to_parquet(tmp_path / "said.parquet")
        bare = {
            "bare": pa.array(images),
            "large": pa.array(images, pa.large_binary()),
            "struct": pa.array([{"bytes": image, "path": "a.png"} for image in images]),
        }
        for name, column in bare.items():
            pq.write_table(pa.table({"img": column, "label": [1, 0, 1, 0]}), tmp_path / f"{name}.parquet")
        found = {name: prepared(tmp_path, tmp_path / f"{name}.parquet") for name in ("said", *bare)}
        assert found["said"].id2label == {0: "no", 1: "yes"}
        assert found["bare"].id2label == {0: "0", 1: "1"}
        for data in found.values():
            assert data.train.labels.tolist() == [1, 0, 1, 0]
            torch.testing.assert_close(data.train[2]["pixel_values"], expected(picture(2, 8, 8)))
        assert len(prepared(tmp_path, f"{tmp_path}/*.parquet", class_names=["no", "yes"]).train) == 16

    def test_datasets_saved_to_disk_and_loaded_by_name(self, tmp_path):
        import datasets

        parts = {"train": table(["b", "a", "b"]), "validation": table(["a", "b"])}
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
        parts["train"].shuffle(seed=1).save_to_disk(tmp_path / "shuffled")
        data = prepared(tmp_path, tmp_path / "saved", validation=tmp_path / "saved")
        assert data.id2label == {0: "a", 1: "b"}
        assert data.train.labels.tolist() == [1, 0, 1]
        assert data.validation.labels.tolist() == [0, 1]
        assert sorted(prepared(tmp_path, tmp_path / "shuffled").train.labels.tolist()) == [0, 1, 1]
        (tmp_path / "hub").mkdir()
        parts["train"].to_parquet(tmp_path / "hub" / "train.parquet")
        assert prepared(tmp_path, f"hub:{tmp_path}/hub").train.labels.tolist() == [1, 0, 1]

    def test_a_hub_name_is_loaded_by_that_name(self, tmp_path, monkeypatch):
        import datasets

        asked = []
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: asked.append((args, more)) or table([0, 1]))
        prepared(tmp_path, "owner/name", validation="hub:name", hub_config="c", hub_validation_split="test", cache="x")
        same = {"streaming": False, "cache_dir": "x"}
        assert asked == [(("owner/name", "c"), {"split": "train", **same}), (("name", "c"), {"split": "test", **same})]

    @pytest.mark.parametrize("ending", [".gz", ""])
    def test_idx_files(self, tmp_path, ending):
        folder = idx_folder(tmp_path / "mnist", ending=ending)
        data = prepared(tmp_path, folder, validation=folder, size=7, channels=1, normalise="fashion_mnist")
        assert data.stats == {"train": 6, "validation": 4}
        assert data.id2label == {0: "0", 1: "1", 2: "2"}
        pixels = np.random.default_rng(4).integers(0, 256, (4, 7, 7), dtype=np.uint8)
        ours = data.validation[3]["pixel_values"][0] * 0.3530 + 0.2860
        torch.testing.assert_close(ours, torch.from_numpy(pixels[3]).float() / 255, atol=1e-6, rtol=0)
        named = prepared(tmp_path, folder / f"t10k-images-idx3-ubyte{ending}", class_names=["top", "bag", "boot"])
        assert named.id2label[2] == "boot"
        assert len(named.train) == 4

    def test_digits(self, monkeypatch):
        data = ImageData(ImageSettings(images="digits", size=8, channels=1, split=[0.8, 0.1, 0.1])).prepare()
        assert data.stats == {"train": 1797 - 180 - 180, "validation": 180, "test": 180}
        assert len(data.id2label) == 10
        assert data.train[0]["pixel_values"].shape == (1, 8, 8)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(BadRequestError, match=r"digits comes with scikit-learn; install the extra: .*\[vision\]"):
            ImageData(ImageSettings(images="digits")).prepare()

    def test_digits_are_not_a_folder_of_that_name(self, tmp_path, monkeypatch):
        class_folder(tmp_path / "digits", ("one", "two"))
        monkeypatch.chdir(tmp_path)
        refused(BadRequestError, r"there is a folder of that name; write ./digits", tmp_path, "digits")
        assert prepared(tmp_path, "./digits").id2label == {0: "one", 1: "two"}

    def test_what_is_trained_on_is_not_validated_on(self, tmp_path):
        folder = class_folder(tmp_path / "c")
        table([0, 1]).to_parquet(tmp_path / "a.parquet")
        for source in (folder, tmp_path / "a.parquet", "digits"):
            message = r"is given for training and for validation; leave validation out, and validation_fraction"
            refused(BadRequestError, message, tmp_path, source, validation=source)

    @pytest.mark.parametrize(
        ("images", "validation", "split"),
        [
            ("c", "./c/", "validation"),
            ("a.parquet", "../{here}/a.parquet", "validation"),
            ("*.parquet", "*.parquet", "validation"),
            ("*.parquet", "a.parquet", "validation"),
            ("mnist/t10k-images-idx3-ubyte.gz", "mnist", "validation"),
            ("saved", "saved", "validation"),
            ("parts", "parts", "train"),
            ("hub:name", "hub:name", "train"),
        ],
    )
    def test_nor_if_it_is_spelt_in_another_way(self, tmp_path, monkeypatch, images, validation, split):
        import datasets

        rows = table([0, 1], names=["x", "y"])
        class_folder(tmp_path / "c")
        idx_folder(tmp_path / "mnist")
        rows.to_parquet(tmp_path / "a.parquet")
        rows.save_to_disk(tmp_path / "saved")
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "parts")
        monkeypatch.chdir(tmp_path)
        if images.startswith("hub:"):
            monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: rows)
        settings = {"validation": validation.format(here=tmp_path.name), "hub_validation_split": split}
        refused(BadRequestError, "is given for training and for validation", tmp_path, images, **settings)

    def test_a_class_without_images_is_not_passed_over(self, tmp_path):
        folder = class_folder(tmp_path / "c", ("a", "c"))
        (folder / "b").mkdir()
        refused(
            BadRequestError, r"the sub-folder \S+/c/b has no images, so its class would be missing", tmp_path, folder
        )

    def test_paths_in_a_table(self, tmp_path):
        """Which images they are is part of the key, and a bad one is named by row and path."""
        import datasets

        files = [str(tmp_path / f"{i}.png") for i in range(2)]
        picture(0).save(files[0])
        keys = set()
        for name, order in (("a", files), ("b", files[::-1])):
            rows = datasets.Dataset.from_dict({"photo": order, "label": [0, 0]})
            rows.to_parquet(tmp_path / f"{name}.parquet")
            data = prepared(tmp_path, tmp_path / f"{name}.parquet", image_column="photo")
            keys.add(data.key)
        assert len(keys) == 2
        assert data.train.gallery.where(0) == f"{tmp_path / 'b.parquet'} row 1 ({files[1]})"

    def test_one_path_may_be_given_as_a_path(self, tmp_path):
        folder = class_folder(tmp_path / "c")
        assert len(ImageData(ImageSettings(images=folder, validation_fraction=0.0)).prepare().train) == 8


class TestClasses:
    def test_numbers_meet_classes_whose_names_are_numbers(self, tmp_path):
        """The folders 0 to 11 come in the order of the alphabet; a row with the number 2 is still of class 2."""
        train = class_folder(tmp_path / "train", [str(i) for i in range(12)], each=1)
        table([2, 11, 3]).to_parquet(tmp_path / "a.parquet")
        data = prepared(tmp_path, train, validation=tmp_path / "a.parquet")
        assert [data.id2label[data.validation[i]["labels"]] for i in range(3)] == ["2", "11", "3"]
        both = prepared(tmp_path, [train, tmp_path / "a.parquet"])
        assert [both.id2label[both.train[12 + i]["labels"]] for i in range(3)] == ["2", "11", "3"]
        words = class_folder(tmp_path / "words")
        message = r"a.parquet row 1 has the label 2, and the classes have names: cat, dog; set class_names"
        refused(BadRequestError, message, tmp_path, words, validation=tmp_path / "a.parquet")

    def test_validation_must_have_the_classes_of_training(self, tmp_path):
        train = class_folder(tmp_path / "train", ("cat", "dog"))
        fewer = prepared(tmp_path, train, validation=class_folder(tmp_path / "fewer", ("dog",)))
        assert fewer.validation[0]["labels"] == 1
        other = class_folder(tmp_path / "other", ("cat", "dogs"))
        refused(
            BadRequestError,
            "the class 'dogs', which training does not have: did you mean 'dog'?",
            tmp_path,
            train,
            validation=other,
        )

    def test_declared_names_must_have_the_same_order(self, tmp_path):
        table([0, 1], names=["a", "b"]).save_to_disk(tmp_path / "one")
        table([0, 1], names=["b", "a"]).save_to_disk(tmp_path / "two")
        message = "two has the classes b, a, and training has a, b; names and order"
        refused(BadRequestError, message, tmp_path, tmp_path / "one", validation=tmp_path / "two")
        refused(BadRequestError, message, tmp_path, [tmp_path / "one", tmp_path / "two"])
        # Also where they are called something else, unless that is what validation declares.
        given = {"class_names": ["A", "B"]}
        refused(BadRequestError, message, tmp_path, tmp_path / "one", validation=tmp_path / "two", **given)
        table([0, 1], names=["A", "B"]).save_to_disk(tmp_path / "three")
        data = prepared(tmp_path, tmp_path / "one", validation=tmp_path / "three", **given)
        assert data.id2label == {0: "A", 1: "B"}

    def test_numbers_that_are_no_classes(self, tmp_path):
        for name, labels in (("good", [0, 1]), ("more", [0, 5]), ("minus", [0, -1]), ("huge", [3, 2**40])):
            table(labels).to_parquet(tmp_path / f"{name}.parquet")
        good, more = tmp_path / "good.parquet", tmp_path / "more.parquet"
        message = r"more.parquet row 2 has the label 5, and training has 2 classes"
        refused(BadRequestError, message, tmp_path, good, validation=more)
        unlabelled = r"row 2 has the label -1; labels start at 0; is this split unlabelled\?"
        refused(BadRequestError, unlabelled, tmp_path, tmp_path / "minus.parquet")
        refused(BadRequestError, "row 2 has the label 1099511627776; more than", tmp_path, tmp_path / "huge.parquet")
        refused(BadRequestError, "class_names has 1 names, .* 2 classes", tmp_path, good, class_names=["x"])
        refused(BadRequestError, "class_names has 'x' more than once", tmp_path, good, class_names=["x", "x"])

    def test_labels_that_are_neither_numbers_nor_names(self, tmp_path):
        table([0.5, 1.0]).to_parquet(tmp_path / "a.parquet")
        refused(BadRequestError, "needs one label column and has none", tmp_path, tmp_path / "a.parquet")
        message = "column 'label' holds (double|float64); a label is a whole number or the name of a class"
        refused(BadRequestError, message, tmp_path, tmp_path / "a.parquet", label_column="label")
        table([0, None]).to_parquet(tmp_path / "b.parquet")
        refused(BadRequestError, "row 2 has no label in column 'label'", tmp_path, tmp_path / "b.parquet")


class TestColumns:
    def test_a_wrong_name_is_answered_with_the_nearest(self, tmp_path):
        table([0, 1]).to_parquet(tmp_path / "a.parquet")
        for column, near in (("image", "imagee"), ("label", "labl")):
            message = rf"a.parquet has no column '{near}'; did you mean '{column}'\? \(columns: "
            refused(BadRequestError, message, tmp_path, tmp_path / "a.parquet", **{f"{column}_column": near})

    def test_several_candidates_must_be_told_apart(self, tmp_path):
        several = table([0, 1], label="fine").add_column("coarse", [1, 0])
        several.to_parquet(tmp_path / "a.parquet")
        message = r"needs one label column and has 2 columns that could be \(fine, coarse\); set label_column"
        refused(BadRequestError, message, tmp_path, tmp_path / "a.parquet")
        assert prepared(tmp_path, tmp_path / "a.parquet", label_column="coarse").train.labels.tolist() == [1, 0]
        message = "column 'fine' holds int64, not images; image does"
        refused(BadRequestError, message, tmp_path, tmp_path / "a.parquet", image_column="fine", label_column="coarse")


class TestDecoding:
    @pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1", "I;16"])
    def test_every_mode_becomes_rgb_and_grey(self, mode):
        if mode == "I;16":
            shades = Image.fromarray((np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8))
            grey = torch.arange(64).reshape(8, 8) * 4
        else:
            shades = picture(1, 8, 8).convert(mode)
            grey = None
        data = encoded(shades, "TIFF" if mode == "CMYK" else "PNG")
        rgb, one = decode(data, 3), decode(data, 1)
        assert (rgb.mode, one.mode) == ("RGB", "L")
        if grey is not None:
            assert np.array_equal(np.asarray(one), grey)
        else:
            assert np.array_equal(np.asarray(rgb), np.asarray(shades.convert("RGBA").convert("RGB")))

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_32_bits_a_pixel_are_refused(self, dtype):
        shades = Image.fromarray(np.arange(64, dtype=dtype).reshape(8, 8))
        with pytest.raises(ValueError, match="it has 32 bits per pixel"):
            decode(encoded(shades, "TIFF"), 3)

    def test_the_first_frame_of_an_animation_and_the_camera_held_upright(self):
        frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
        data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert decode(data, 3).getpixel((0, 0)) == (255, 0, 0)
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by 90 degrees
        assert decode(encoded(picture(1, 12, 10), "JPEG", exif=exif), 3).size == (10, 12)

    def test_a_camera_that_speaks_nonsense_costs_no_picture(self):
        photo = picture(1, 12, 10)
        for data in (encoded(photo, exif=b"Exif\0\0 nothing of the kind"), encoded(photo, exif=b"MM\0*\0\0\0\x08\xff")):
            assert np.array_equal(np.asarray(decode(data, 3)), np.asarray(photo))

    def test_16_bits_of_a_pgm_become_8(self):
        shades = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
        data = b"P5 8 8 65535\n" + shades.astype(">u2").tobytes()
        assert np.array_equal(np.asarray(decode(data, 1)), shades >> 8)

    def test_a_palette_with_transparency_is_no_warning(self, recwarn):
        see_through = picture(1, 8, 8).convert("P")
        assert decode(encoded(see_through, transparency=bytes(range(200))), 3).mode == "RGB"
        assert not [str(w.message) for w in recwarn]

    @pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 40), (9, 50), (8, 8)])
    @pytest.mark.parametrize("crop_fraction", [1.0, 0.875])
    def test_validation_is_what_the_image_processor_of_transformers_does(self, tmp_path, width, height, crop_fraction):

        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        image = picture(3, width, height)
        table([0, 0], [encoded(image)] * 2).to_parquet(tmp_path / "a.parquet")
        data = prepared(tmp_path, tmp_path / "a.parquet", crop_fraction=crop_fraction, normalise="imagenet")
        data.save_beside(tmp_path)
        theirs = AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(data.train[0]["pixel_values"], theirs, atol=1e-5, rtol=0)


class TestHoldingOut:
    def test_a_seeded_share_is_held_out_and_copies_stay_together(self, tmp_path):
        images = [encoded(picture(i // 2)) for i in range(40)]  # every image twice
        table(list(range(40)), images).to_parquet(tmp_path / "a.parquet")
        data = prepared(tmp_path, tmp_path / "a.parquet", validation_fraction=0.25)
        train, held_out = data.train.labels, data.validation.labels
        assert len(held_out) == 10
        assert sorted([*train, *held_out]) == list(range(40))
        assert not {i // 2 for i in train.tolist()} & {i // 2 for i in held_out.tolist()}
        again = prepared(tmp_path, tmp_path / "a.parquet", validation_fraction=0.25)
        other = prepared(tmp_path, tmp_path / "a.parquet", validation_fraction=0.25, split_seed=1)
        order = prepared(tmp_path, tmp_path / "a.parquet", validation_fraction=0.25, seed=1)
        assert again.key == order.key == data.key != other.key
        assert again.validation.labels.tolist() == held_out.tolist() != other.validation.labels.tolist()

    def test_a_split_is_not_by_position(self, tmp_path):
        folder = class_folder(tmp_path / "c", ("a", "b", "c"), each=20)
        data = prepared(tmp_path, folder, split=[0.5, 0.3, 0.2])
        assert data.stats == {"train": 30, "validation": 18, "test": 12}
        assert set(data.validation.labels.tolist()) == {0, 1, 2}

    def test_too_few_to_hold_out(self, tmp_path):
        folder = class_folder(tmp_path / "c", ("a",), each=1)
        refused(
            BadRequestError,
            "1 images \\(duplicates counted once\\) are too few",
            tmp_path,
            folder,
            validation_fraction=0.5,
        )

    def test_the_key_follows_classes_labels_and_images(self, tmp_path):
        images = [encoded(picture(i)) for i in range(2)]
        kinds = {
            "a": table([0, 1], images, ["x", "y"]),
            "b": table([1, 0], images, ["x", "y"]),
            "c": table([0, 1], images, ["x", "z"]),
            "d": table([0, 1], [images[0], images[1] + b" "], ["x", "y"]),
        }
        for name, rows in kinds.items():
            rows.to_parquet(tmp_path / f"{name}.parquet")
        assert len({prepared(tmp_path, tmp_path / f"{name}.parquet").key for name in kinds}) == 4

    def test_a_small_share_of_few_images_is_one(self):
        part_of = assign_parts(np.arange(3, dtype=np.uint64), [0.99, 0.01], seed=0)
        assert np.bincount(part_of).tolist() == [2, 1]


class TestBadImages:
    def bad_table(self, tmp_path):
        images = [encoded(picture(i)) for i in range(6)]
        images[1], images[2], images[5] = b"not an image", encoded(picture(2), "JPEG")[:200], None
        table(list(range(6)), images).to_parquet(tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    def test_they_are_named_counted_once_and_replaced_by_another(self, tmp_path, caplog):
        data = prepared(tmp_path, self.bad_table(tmp_path)).train
        with caplog.at_level(logging.WARNING):
            labels = [data[i]["labels"] for i in (2, 0, 1, 2, 3, 4, 5)]
        assert [labels[i] for i in (1, 4, 5)] == [0, 3, 4]
        assert {labels[i] for i in (0, 2, 6)} <= {0, 3, 4}
        assert labels[0] == labels[3]
        assert [place.rpartition("a.parquet ")[2] for place in data.bad_images] == ["row 2", "row 3", "row 6"]
        assert len(caplog.messages) == 3
        assert "a.parquet row 2 cannot be decoded: it is not an image of a known format; another" in " ".join(
            caplog.messages
        )

    def test_worker_processes_count_for_all(self, tmp_path):
        data, alone = (prepared(tmp_path, self.bad_table(tmp_path)) for _ in range(2))
        loader = DataLoader(data.train, 2, num_workers=2, collate_fn=data.collate)
        found = torch.cat([batch["labels"] for batch in loader]).tolist()
        assert found == [alone.train[i]["labels"] for i in reversed(range(6))][::-1]  # whoever finds what first
        assert len(data.train.bad_images) == 3

    def test_neighbours_that_are_bad_are_not_all_replaced_by_one(self, tmp_path):
        """A copy that broke off, of images sorted by class."""
        folder = class_folder(tmp_path / "c", ("ant", "bee", "cat"), each=20)
        for file in (folder / "ant").iterdir():
            file.write_bytes(file.read_bytes()[:60])
        data = prepared(tmp_path, folder).train
        seen = Counter(data[i]["pixel_values"].sum().item() for i in range(60))
        assert len(seen) == 40
        assert max(seen.values()) <= 5

    @pytest.mark.parametrize("workers", [0, 1])
    def test_strict_stops_with_one_line_also_from_a_worker(self, tmp_path, workers):
        folder = class_folder(tmp_path / "c")
        (folder / "cat" / "1.png").write_bytes(encoded(picture(1))[:60])
        data = prepared(tmp_path, folder, strict=True)
        with pytest.raises(BadFileError, match=r"c/cat/1.png cannot be decoded: .*; set strict to false") as caught:
            list(DataLoader(data.train, 2, num_workers=workers, collate_fn=data.collate))
        assert "\n" not in str(caught.value)
        assert "Error:" not in str(caught.value)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_an_error_that_may_pass_stops_and_leaves_the_image_in_its_place(self, tmp_path, monkeypatch, workers):
        data = prepared(tmp_path, class_folder(tmp_path / "c"))
        real = data.train.gallery.encoded

        def fails(row):
            if row == 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(row)

        monkeypatch.setattr(data.train.gallery, "encoded", fails)
        with pytest.raises(
            BadFileError, match=r"cat/3.png could not be read: Too many open files; try again"
        ) as caught:
            list(DataLoader(data.train, 2, num_workers=workers, collate_fn=data.collate))
        assert "\n" not in str(caught.value)
        assert data.train.bad_images == []

    def test_no_memory_is_not_a_bad_image(self, tmp_path, monkeypatch):
        data = prepared(tmp_path, class_folder(tmp_path / "c")).train

        def fails(row):
            raise MemoryError

        monkeypatch.setattr(data.gallery, "encoded", fails)
        with pytest.raises(MemoryError):
            data[0]
        assert data.bad_images == []

    def test_a_file_that_went_away_and_a_folder_of_nothing_good(self, tmp_path):
        folder = class_folder(tmp_path / "c", each=1)
        data = prepared(tmp_path, folder).train
        (folder / "cat" / "0.png").unlink()
        assert data[0]["labels"] == 1
        assert data.bad_images == [str(folder / "cat" / "0.png")]
        (folder / "dog" / "0.png").write_bytes(b"")
        with pytest.raises(BadFileError, match="none of 2 images can be decoded"):
            data[1]
        with pytest.raises(IndexError):
            data[2]


class TestRefusals:
    def test_sources_without_images(self, tmp_path):
        (tmp_path / "empty").mkdir()
        refused(BadRequestError, "there are no images in the folder .*empty", tmp_path, tmp_path / "empty")
        refused(BadRequestError, "there is no file or folder .*nowhere", tmp_path, tmp_path / "nowhere")
        refused(BadRequestError, "no file matches", tmp_path, f"{tmp_path}/*.parquet")
        refused(BadRequestError, "no images were given for train", tmp_path, [])
        table([]).to_parquet(tmp_path / "none.parquet")
        refused(BadRequestError, r"write .*/\*.parquet", tmp_path, tmp_path)
        refused(BadFileError, "none.parquet has no rows", tmp_path, tmp_path / "none.parquet", label_column="label")
        (tmp_path / "a.txt").write_text("text")
        refused(BadRequestError, "a.txt is not a source of labelled images; use a folder", tmp_path, tmp_path / "a.txt")
        (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
        refused(BadFileError, "b.parquet is a damaged or incomplete Parquet file", tmp_path, tmp_path / "b.parquet")
        table([0, 1]).to_parquet(tmp_path / "c.parquet")
        refused(BadFileError, "c.parquet cannot be loaded: .*a.txt", tmp_path / "a.txt", tmp_path / "c.parquet")
        datasets.DatasetDict({"train": table([0, 1]), "test": table([1, 0])}).save_to_disk(tmp_path / "saved")
        refused(
            BadRequestError,
            "saved' has no split 'validation'; it has train, test: choose one of them .*hub_validation_split",
            tmp_path,
            tmp_path / "saved",
            validation=str(tmp_path / "saved"),
        )

    def test_folders_that_are_not_of_classes(self, tmp_path):
        parts = class_folder(tmp_path / "parts", ("train", "val"))
        refused(BadRequestError, "are train, val, which are parts and not classes; set images=", tmp_path, parts)
        flat = class_folder(tmp_path / "flat")
        picture(1).save(flat / "loose.png")
        refused(BadRequestError, "loose.png is not in a class folder; move it into one", tmp_path, flat)

    def test_broken_idx_files(self, tmp_path):
        folder = idx_folder(tmp_path / "m", ending="")
        images, labels = (folder / f"train-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
        whole = images.read_bytes()
        images.write_bytes(whole[:-1])
        refused(BadFileError, r"says it holds \(6, 7, 7\), and has 293 bytes", tmp_path, images)
        images.write_bytes(b"\0\0\x0d\x03" + whole[4:])
        refused(BadFileError, "is not an IDX file of bytes with 3 dimensions", tmp_path, images)
        images.write_bytes(whole)
        write_idx(labels, np.zeros(5, np.uint8))
        refused(BadFileError, "has 6 images, and .* 5 labels", tmp_path, images)
        labels.unlink()
        refused(BadRequestError, "its labels in train-labels-idx1-ubyte, which is not beside it", tmp_path, images)
        (folder / "t10k-images-idx3-ubyte").unlink()
        refused(BadRequestError, "no t10k-images", tmp_path, class_folder(tmp_path / "c"), validation=folder)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"size": 0}, "size is 0; a whole number of at least 1 is needed"),
            ({"size": 1.5}, "size is 1.5; a whole number of at least 1"),
            ({"channels": 4}, "channels is 4; choose one of 1, 3"),
            ({"crop_fraction": 0}, "crop_fraction is 0; a number above 0 and at most 1 is needed"),
            ({"validation_fraction": 1.0}, "validation_fraction is 1.0; a number of at least 0 and below 1"),
            ({"split": [0.5, 0.2]}, "split=.* add up to 1"),
            ({"split": [0.5, 0.5], "validation": "x"}, "both split and validation"),
            ({"seed": 2**64}, "seed is 18446744073709551616; a whole number of at least"),
            ({"split_seed": -(2**64)}, "split_seed is -18446744073709551616; a whole"),
            ({"workers": -1}, "workers is -1; a whole number of at least 0 and at most 256 is needed"),
            ({"normalise": "imagnet"}, "did you mean 'imagenet'?"),
            ({"mean": [0.1]}, "one of mean and std was given"),
            ({"mean": [0.1, 0.2], "std": [1, 1]}, "mean has 2 values, and images have channels=3"),
            ({"mean": [0.1], "std": [0]}, r"std\[0\] is 0; a number above 0 is needed"),
            ({"normalise": "cifar10", "channels": 1}, "mean has 3 values, and images have channels=1"),
            ({"augment": {"flipp": 0.5}}, "augment: 'flipp' is not known; did you mean 'flip'?"),
            ({"augment": "all"}, "augment is 'all'; a list of keys and values is needed"),
            ({"augment": {"crop_scale": ["a", 1]}}, r"augment.crop_scale\[0\] is 'a'; a number is needed"),
            ({"augment": {"flip": 2}}, "augment.flip is 2; a number of at least 0 and at most 1 is needed"),
            ({"augment": {"flip": "often"}}, "augment.flip is 'often'; a number"),
            ({"augment": {"rand_augment": -1}}, "augment.rand_augment is -1; a whole number of at least 0"),
            ({"augment": {"magnitude": 11}}, "augment.magnitude is 11; a number of at least 0 and at most 10"),
            ({"augment": {"crop_scale": [1, 0.5]}}, r"augment.crop_scale: \[1.0, 0.5\] .* as \[0.08, 1.0\]"),
            ({"augment": {"label_smoothing": 1.0}}, "label_smoothing is 1.0; a number of at least 0 and below 1"),
            ({"augment": {"crop_scale": (1, 0.5)}}, r"augment.crop_scale: \[1.0, 0.5\] .* as \[0.08, 1.0\]"),
        ],
    )
    def test_settings(self, tmp_path, settings, message):
        refused(BadRequestError, message, tmp_path, "digits", **settings)

    @pytest.mark.parametrize(("module", "settings"), [("PIL.Image", {}), ("kornia", {"augment": {"rand_augment": 2}})])
    def test_a_missing_extra_is_named(self, tmp_path, monkeypatch, module, settings):
        monkeypatch.setitem(sys.modules, module, None)
        refused(BadRequestError, r'pip install "tokenformer\[vision\]"', tmp_path, "digits", **settings)


def test_the_usual_means_and_deviations():
    """Of the training images' pixels in [0, 1], as those who work with these sets give them."""
    assert CONSTANTS["cifar100"] == ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762])
    assert CONSTANTS["cifar10"] == ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
    assert CONSTANTS["imagenet"] == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert (CONSTANTS["mnist"], CONSTANTS["fashion_mnist"]) == (([0.1307], [0.3081]), ([0.2860], [0.3530]))


def test_a_recipes_section_and_its_resolved_copy():
    settings = ImageSettings(images="x", augment={"flip": 0.5})
    assert settings.augment == AugmentSettings(flip=0.5)
    assert ImageSettings(**settings.model_dump()) == settings
    assert not AugmentSettings().mixes


def test_the_example_of_the_docs_runs(capsys):
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    assert "torch.Size([64, 3, 32, 32]) torch.Size([64, 10])" in capsys.readouterr().out


def test_what_goes_to_a_worker_is_small(tmp_path):
    images = [encoded(picture(i, 64, 64)) for i in range(40)]
    table([0] * 40, images).to_parquet(tmp_path / "a.parquet")
    data = prepared(tmp_path, tmp_path / "a.parquet").train
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < len(images[0])
    assert torch.equal(again[7]["pixel_values"], data[7]["pixel_values"])
